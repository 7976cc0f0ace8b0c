"""Collectives of a stage's tensor-parallel ranks through memory that they share, by the C++ kernels.

A wait in a kernel holds no interpreter lock and calls no hook: should a rank be lost, the watchdog's thread ends this
one.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastserve_hpc.parallel.hosts import share_one_host
from fastserve_hpc.parallel.idle import Waiter
from fastserve_hpc.parallel.mpi_api import MPI
from fastserve_hpc.parallel.mpi_comm import Collectives, MakeCollectives
from fastserve_hpc.parallel.mpi_group import MpiGroup
from fastserve_hpc.parallel.mpi_init import exchange

if TYPE_CHECKING:
    from fastserve_kernels.kernels import Kernels
    from fastserve_kernels.shared import SharedGroup

_SUMMED = (torch.bfloat16, torch.float32)


def collectives_with(kernels: Kernels) -> MakeCollectives:
    """Makes collectives through shared memory where a stage's ranks are on one host, else through MPI."""

    def make(comm: MPI.Intracomm, waiter: Waiter) -> Collectives:
        over_mpi = MpiGroup(comm, waiter)
        group = _open_group(comm, waiter.is_crowded) if comm.size > 1 and share_one_host(comm) else None
        return over_mpi if group is None else SharedCollectives(kernels, group, over_mpi)

    return make


class SharedCollectives:
    """`all_reduce` and `all_gather` in `shared`; `over_mpi` takes what the kernels do not."""

    def __init__(self, kernels: Kernels, shared: SharedGroup, over_mpi: MpiGroup) -> None:
        self.shared = shared
        self._kernels = kernels
        self._over_mpi = over_mpi

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `TensorComm.all_reduce`."""
        if x.dtype not in _SUMMED:
            return self._over_mpi.all_reduce(x)
        if x.is_contiguous():
            return self._kernels.all_reduce(x, self.shared)
        return x.copy_(self._kernels.all_reduce(x.contiguous(), self.shared))

    def all_gather(self, x: Tensor) -> Tensor:
        """See `TensorComm.all_gather`."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        joined = self._kernels.all_gather(rows, self.shared)
        return joined.view(*x.shape[:-1], joined.shape[-1])

    def gather(self, x: Tensor) -> Tensor:
        """See `TensorComm.gather`."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        joined = self._kernels.gather(rows, self.shared)
        return x if joined is None else joined.view(*x.shape[:-1], joined.shape[-1])


def _open_group(comm: MPI.Intracomm, is_crowded: bool) -> SharedGroup | None:
    """A segment that all ranks of `comm` have opened, None where one of them cannot; collective."""
    path = _create(comm.size) if comm.rank == 0 else None
    name = exchange(comm, str(path or "").encode())[0].decode()
    group = _open(Path(name), comm, is_crowded) if name else None
    everyone = all(exchange(comm, b"opened" if group is not None else b""))
    if path is not None:
        path.unlink()
    return group if everyone else None


def _create(num_ranks: int) -> Path | None:
    from fastserve_kernels.shared import create_segment

    try:
        return create_segment(num_ranks)
    except OSError:  # no room in shared memory, or none at all
        return None


def _open(path: Path, comm: MPI.Intracomm, is_crowded: bool) -> SharedGroup | None:
    from fastserve_kernels.shared import SharedGroup

    try:
        return SharedGroup(path, comm.rank, comm.size, is_crowded=is_crowded)
    except (OSError, ValueError):  # ranks in containers with shared memory of their own
        return None
