"""This rank's place among the ranks, and its ways to them: MPI, watchdog, control and data plane."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from fastserve_hpc import doctor
from fastserve_hpc.config import EngineConfig, ServerConfig
from fastserve_hpc.errors import FastServeError
from fastserve_hpc.models.spec import ModelSpec
from fastserve_hpc.parallel.comm import do_nothing
from fastserve_hpc.parallel.control import Control, LocalControl, WorkerControl
from fastserve_hpc.parallel.hosts import CoreShare, core_share
from fastserve_hpc.parallel.idle import Backoff
from fastserve_hpc.parallel.mpi_init import UNKNOWN, world_size_from_env
from fastserve_hpc.parallel.topology import Topology
from fastserve_hpc.slurm.step import kill_soon

if TYPE_CHECKING:
    import torch
    from fastserve_kernels.kernels import Kernels

    from fastserve_hpc.parallel.comm import TensorComm
    from fastserve_hpc.parallel.mpi_api import MPI
    from fastserve_hpc.parallel.watchdog import Watchdog

_LOADING_SILENCE_S = 120.0
_SILENT_NODES_S = 10.0


class NodePlace(NamedTuple):
    """This rank's number on its node, and how many ranks are there."""

    local_rank: int
    num_ranks: int


class World:
    """The ranks as this one sees them. Without `mpi` it is alone."""

    def __init__(self, topology: Topology, mpi: MPI.Intracomm | None = None, watchdog: Watchdog | None = None):
        self.topology = topology
        self.mpi = mpi
        self._watchdog = watchdog

    def check(self) -> None:
        """Raise `RankError` once a rank is lost."""
        if self._watchdog is not None:
            self._watchdog.check()

    def abort(self, cause: FastServeError) -> NoReturn:
        """End all ranks at once because of `cause`, from any thread."""
        if self._watchdog is not None:
            self._watchdog.abort(cause)
        self.say(str(cause))
        os._exit(int(cause.exit_code))

    def loading(self, heartbeat_s: float) -> AbstractContextManager[None]:
        """While a rank loads libraries and weights it may be silent: both can hold the interpreter lock for long."""
        return nullcontext() if self._watchdog is None else _patience(self._watchdog, heartbeat_s)

    def backoff(self) -> Backoff:
        """The pauses of a rank that waits for plans."""
        return Backoff(doze=None if self._watchdog is None else self._watchdog.doze)

    def say(self, text: str) -> None:
        """A line of news on standard error, from rank 0 only."""
        if self.topology.is_coordinator:
            print(f"fastserve-hpc: {text}", file=sys.stderr, flush=True)

    def control(self) -> Control:
        """The coordinator's side of the control plane; collective with `worker_control`."""
        if self.mpi is None:
            return LocalControl()
        from fastserve_hpc.parallel.mpi_control import MpiControl

        wake = do_nothing if self._watchdog is None else self._watchdog.wake_others
        return MpiControl(self.mpi, self.check, wake)

    def worker_control(self) -> WorkerControl:
        """The side of a rank other than 0."""
        if self.mpi is None:
            raise ValueError("a world of one rank has no other ranks")
        from fastserve_hpc.parallel.mpi_control import MpiWorkerControl

        return MpiWorkerControl(self.mpi, self.check)

    def comm(self, max_link_bytes: int, device: torch.device, kernels: Kernels | None = None) -> TensorComm:
        """The data plane; collective. With `kernels`, which all ranks then have, sums go through shared memory."""
        if self.mpi is None:
            from fastserve_hpc.parallel.single import SingleComm

            return SingleComm()
        if device.type == "cuda":
            from fastserve_hpc.parallel.torch_comm import TorchTensorComm

            return TorchTensorComm(self.mpi, self.topology, device)
        from fastserve_hpc.parallel.mpi_comm import MpiTensorComm

        if kernels is None:
            return MpiTensorComm(self.mpi, self.topology, max_link_bytes, self.check)
        from fastserve_hpc.parallel.shared_group import collectives_with

        return MpiTensorComm(self.mpi, self.topology, max_link_bytes, self.check, collectives_with(kernels))

    def place_on_node(self) -> NodePlace:
        """Collective."""
        if self.mpi is None:
            return NodePlace(0, 1)
        from fastserve_hpc.parallel.mpi_api import MPI

        node = self.mpi.Split_type(MPI.COMM_TYPE_SHARED)
        place = NodePlace(int(node.rank), int(node.size))
        node.Free()
        return place

    def node_file(self) -> AbstractContextManager[int]:
        """A descriptor of an empty file in memory that the ranks of this node share; collective."""
        from fastserve_hpc.parallel.node_file import open_node_file

        return open_node_file(self.mpi, self.check)

    def core_share(self) -> CoreShare:
        """How this rank shares the cores that it may run on; collective."""
        if self.mpi is None:
            return CoreShare(len(os.sched_getaffinity(0)))
        return core_share(self.mpi, self.topology)

    def minimum(self, *values: int) -> tuple[int, ...]:
        """The least of each value over all ranks; collective."""
        return tuple(min(column) for column in zip(*self._exchange(values), strict=True))

    def total(self, value: int) -> int:
        """The sum over all ranks; collective."""
        return sum(row[0] for row in self._exchange((value,)))

    def _exchange(self, values: tuple[int, ...]) -> list[tuple[int, ...]]:
        """What every rank brings."""
        if self.mpi is None:
            return [values]
        from fastserve_hpc.parallel.mpi_init import exchange

        own = " ".join(map(str, values)).encode()
        rows = exchange(self.mpi, own, timeout_s=None, check=self.check)
        return [tuple(map(int, line.split())) for line in rows]


def check_launch(config: EngineConfig, environ: dict[str, str]) -> None:
    """Raise `ConfigError` where the launcher is known to have started another number of ranks than asked for."""
    announced = world_size_from_env(environ)
    if announced != UNKNOWN:
        config.check_world_size(announced)


def is_first_rank(environ: dict[str, str]) -> bool:
    """Whether this is rank 0 as far as the launcher tells: the one that speaks for all before MPI is up."""
    ranks = [environ.get(name) for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")]
    return next((rank for rank in ranks if rank is not None), "0") == "0"


@contextmanager
def _patience(watchdog: Watchdog, heartbeat_s: float) -> Iterator[None]:
    watchdog.allow_silence(_LOADING_SILENCE_S)
    yield
    watchdog.allow_silence(heartbeat_s)


@contextmanager
def join_world(config: EngineConfig, server: ServerConfig, spec: ModelSpec | None = None) -> Iterator[World]:
    """Meet the other ranks and let the doctor look at all; an exception inside ends them all.

    `spec` saves the doctor from reading the model's config again.
    """
    if world_size_from_env(os.environ) == 1:
        _heed(doctor.run(None, config, os.environ, spec), World(Topology()))
        yield World(Topology())
        return
    from fastserve_hpc.parallel.mpi_init import finalize_mpi
    from fastserve_hpc.parallel.mpi_watchdog import start_watchdog

    mpi = _start_mpi()
    config.check_world_size(mpi.size)
    topology = Topology(mpi.rank, config.tp, config.pp)
    # Before the watchdog, which would wait long for ranks that cannot be reached.
    _heed(doctor.run(mpi, config, os.environ, spec), World(topology, mpi))
    watchdog = start_watchdog(mpi, topology, server.heartbeat_s, lambda _: kill_soon(os.environ, topology.rank))
    try:
        yield World(topology, mpi, watchdog)
        finalize_mpi(mpi, watchdog.check)
    except BaseException as cause:
        watchdog.abort(cause)
    watchdog.close()


def _start_mpi() -> MPI.Intracomm:
    """MPI_Init, which is given up soon where nodes do not answer: it would hang for minutes."""
    from fastserve_hpc.parallel.mpi_init import init_mpi

    silent = doctor.preflight(os.environ)
    if not silent:
        return init_mpi()
    for finding in silent:
        print(finding, file=sys.stderr, flush=True)
    return init_mpi(warn_after_s=5.0, give_up_after_s=_SILENT_NODES_S)


def _heed(findings: list[doctor.Finding], world: World) -> None:
    """Show the doctor's warnings; raise `ConfigError` for errors."""
    for finding in doctor.at_level(findings, "warning"):
        world.say(str(finding))
    doctor.raise_errors(findings, world.mpi)
