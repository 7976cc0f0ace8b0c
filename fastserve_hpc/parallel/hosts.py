"""Which ranks share a host, and how they share its cores."""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from fastserve_hpc.parallel.addresses import host_key
from fastserve_hpc.parallel.mpi_init import exchange
from fastserve_hpc.parallel.topology import Topology

if TYPE_CHECKING:
    from fastserve_hpc.parallel.mpi_api import MPI


class RankPlace(NamedTuple):
    """A rank as others on its host see it."""

    mask: int
    """The cores that it may run on, as bits."""
    stage: int
    tp_rank: int


@dataclass(frozen=True, slots=True)
class CoreShare:
    """How a rank computes on the cores that it shares with others."""

    num_threads: int
    is_crowded: bool = False
    """There are more ranks than cores: a wait must not keep a core for long."""
    core: int | None = None
    """The one that it computes on, where its stage has more ranks than cores."""
    gives_way: bool = False
    """It computes on whatever cores its stage's other ranks leave while they wait."""

    def settle(self) -> None:
        """Apply this to the calling thread and to those that it starts from now on."""
        with suppress(OSError):
            if self.core is not None:
                os.sched_setaffinity(0, {self.core})
            if self.gives_way:  # as a batch thread: when it wakes up, who computes goes on
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def share_one_host(world: MPI.Intracomm) -> bool:
    """Whether all ranks reach each other by the loopback address; collective."""
    return len(set(exchange(world, host_key().encode()))) == 1


def is_crowded(world: MPI.Intracomm) -> bool:
    """Whether this host has more ranks than cores that they may run on; collective."""
    masks = [place.mask for place in _places_here(world, RankPlace(_own_mask(), 0, 0))]
    return len(masks) > functools.reduce(operator.or_, masks).bit_count()


def core_share(world: MPI.Intracomm, topology: Topology) -> CoreShare:
    """This rank's; collective."""
    own = RankPlace(_own_mask(), topology.stage, topology.tp_rank)
    return share_cores(own, _places_here(world, own))


def share_cores(own: RankPlace, everyone: Sequence[RankPlace]) -> CoreShare:
    """A rank's share of the cores that it may run on; ranks bound to cores of their own share none.

    A stage's ranks compute at the same time and wait for each other. Where they are more than cores, as many as the
    cores divide evenly have one thread each, bound to its core; the others have one on every core, which runs while
    the bound ones wait: three ranks on two cores then take 1.5 times as long as one rank's part, not twice.
    """
    cores = [core for core in range(own.mask.bit_length()) if own.mask >> core & 1]
    sharing = [place for place in everyone if place.mask & own.mask]
    if len(sharing) <= len(cores):
        return CoreShare(len(cores) // len(sharing))
    fellows = sorted(place.tp_rank for place in sharing if place.stage == own.stage)
    if len(fellows) <= len(cores):
        return CoreShare(min(2, len(cores) // len(fellows)), is_crowded=True)
    num_left_over = len(fellows) % len(cores)
    position = fellows.index(own.tp_rank)
    if position < num_left_over:
        return CoreShare(len(cores), is_crowded=True, gives_way=True)
    return CoreShare(1, is_crowded=True, core=cores[(position - num_left_over) % len(cores)])


def _own_mask() -> int:
    return sum(1 << core for core in os.sched_getaffinity(0))


def _places_here(world: MPI.Intracomm, own: RankPlace) -> list[RankPlace]:
    """The ranks on this host; collective."""
    own_key = host_key()
    told = exchange(world, f"{own_key} {own.mask:x} {own.stage} {own.tp_rank}".encode())
    places = [place.decode().split() for place in told]
    return [RankPlace(int(mask, 16), int(stage), int(tp)) for key, mask, stage, tp in places if key == own_key]
