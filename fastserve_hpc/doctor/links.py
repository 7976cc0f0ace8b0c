"""Trying the ways between ranks before anything depends on them: every wait ends, whatever the network does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastserve_hpc.doctor.facts import LinkProbe
from fastserve_hpc.parallel.idle import Backoff
from fastserve_hpc.parallel.topology import Topology

if TYPE_CHECKING:
    from fastserve_hpc.parallel.mpi_api import MPI

FIRST_TAG, SMALL_TAG, LARGE_TAG = 9001, 9002, 9003
SMALL_ROUNDS, LARGE_ROUNDS = 5, 3
_SMALL = b"hello..."
_LARGE = bytes(2**20)
"""Constants, because a message that is given up may still be read by MPI later."""
_REDUCED = 1024


class Deadline:
    """A moment after which nobody waits any more."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._at = time.monotonic() + seconds

    def left_s(self) -> float:
        return max(0.0, self._at - time.monotonic())

    def wait(self, done: Callable[[], bool]) -> bool:
        """Poll until `done()` or the end; says which."""
        backoff = Backoff(longest_s=1e-3)
        while not done():
            if self.left_s() == 0:
                return done()
            backoff.pause()
        return True


@dataclass(frozen=True, slots=True)
class Links:
    """What came of trying the links of one rank."""

    probes: tuple[LinkProbe, ...]
    all_reduce_s: float | None = None


def peers_of(topology: Topology) -> list[int]:
    """The ranks that this one talks to when it computes: its stage, and its likes in the stages beside it."""
    neighbours = (topology.previous_rank, topology.next_rank, *topology.stage_ranks)
    return sorted({rank for rank in neighbours if rank is not None} - {topology.rank})


def try_links(world: MPI.Intracomm, topology: Topology, timeout_s: float) -> Links:
    """Exchange messages with every peer and time them. Collective over the ranks that are up.

    Peers that were started with another topology are left alone: they would not join in.
    """
    deadline = Deadline(timeout_s)
    greeting = f"{topology.tp_size:4}{topology.num_stages:4}".encode()
    peers = peers_of(topology)
    first = [_Exchange(world, peer, FIRST_TAG, greeting) for peer in peers]
    deadline.wait(lambda: every(exchange.is_done() for exchange in first))
    probes, strangers = [], set()
    for exchange in first:
        if exchange.is_done():
            if exchange.received == greeting:
                probes.append(_timed(world, exchange.peer, deadline))
            else:
                strangers.add(exchange.peer)
        else:
            exchange.give_up()
            probes.append(
                LinkProbe(exchange.peer, error=exchange.error or f"no message got through in {timeout_s:g} s")
            )
    stage = [probe for probe in probes if probe.peer in topology.stage_ranks]
    if not stage or any(probe.error for probe in stage) or strangers & set(topology.stage_ranks):
        return Links(tuple(probes))
    reduce_s = _time_all_reduce(world, topology, deadline)
    if reduce_s is None:
        probes.append(LinkProbe(stage[0].peer, error=f"the all-reduce of its stage did not end in {timeout_s:g} s"))
    return Links(tuple(probes), reduce_s)


def every(conditions: Iterable[bool]) -> bool:
    """`all` without a short-cut, for conditions that make progress by being looked at."""
    return all(list(conditions))


class _Exchange:
    """A message to a peer and one from it, both under way at once, so that no order can block."""

    def __init__(self, world: MPI.Intracomm, peer: int, tag: int, message: bytes):
        self.peer = peer
        self.error = ""
        self.received = bytearray(len(message))
        self._receive: MPI.Request = world.Irecv(self.received, peer, tag)
        self._send: MPI.Request = world.Isend(message, peer, tag)

    def is_done(self) -> bool:
        try:
            return not self.error and every((self._receive.Test(), self._send.Test()))
        except RuntimeError as error:  # MPI.Exception
            self.error = str(error)
            return False

    def give_up(self) -> None:
        """MPI must not write into memory that is ours again."""
        if not self.error:
            self._receive.Cancel()
            self._receive.Wait()


def _timed(world: MPI.Intracomm, peer: int, deadline: Deadline) -> LinkProbe:
    """The quickest of a few exchanges, small and large."""
    times: dict[int, list[float]] = {SMALL_TAG: [], LARGE_TAG: []}
    for tag, message in [(SMALL_TAG, _SMALL)] * SMALL_ROUNDS + [(LARGE_TAG, _LARGE)] * LARGE_ROUNDS:
        began = time.perf_counter()
        exchange = _Exchange(world, peer, tag, message)
        if not deadline.wait(exchange.is_done):
            exchange.give_up()
            return LinkProbe(peer, error=exchange.error or f"{len(message)} bytes did not get through")
        times[tag].append(time.perf_counter() - began)
    return LinkProbe(peer, latency_s=min(times[SMALL_TAG]), bytes_per_s=len(_LARGE) / min(times[LARGE_TAG]))


def _time_all_reduce(world: MPI.Intracomm, topology: Topology, deadline: Deadline) -> float | None:
    """The quickest of a few sums of 4 KiB over the tensor-parallel group; None where they do not end: an error, after
    which MPI may not be used."""
    group = world.Get_group().Incl(list(topology.stage_ranks))
    comm = world.Create_group(group, FIRST_TAG)
    times = []
    for _ in range(SMALL_ROUNDS):
        sent, total = bytearray(4 * _REDUCED), bytearray(4 * _REDUCED)
        began = time.perf_counter()
        request = comm.Iallreduce([sent, "f"], [total, "f"])
        if not deadline.wait(request.Test):
            return None
        times.append(time.perf_counter() - began)
    comm.Free()
    group.Free()
    return min(times)
