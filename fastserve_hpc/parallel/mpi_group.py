"""Collectives of a stage's tensor-parallel ranks over MPI, for tensors in host memory.

Each rank sends its part to every other and sums what it gets in rank order, so that an element's bits depend neither
on the rank nor on the tensor's shape. MPI's own all-reduce promises neither, and its blocking calls take milliseconds
when there are more ranks than cores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastserve_hpc.parallel.idle import Waiter
from fastserve_hpc.parallel.mpi_api import MPI


def as_bytes(x: Tensor) -> MPI.buffer:
    """The memory of a contiguous host tensor, of any dtype; the tensor must outlive its use."""
    return MPI.buffer.fromaddress(x.data_ptr(), x.numel() * x.element_size())


class MpiGroup:
    """`all_reduce` and `all_gather` among the ranks of `comm`, in their order."""

    def __init__(self, comm: MPI.Intracomm, waiter: Waiter) -> None:
        self._comm = comm
        self._waiter = waiter
        self._others = [rank for rank in range(comm.size) if rank != comm.rank]
        self._arena = torch.empty(0, dtype=torch.uint8)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum in place; see `TensorComm.all_reduce`."""
        if not self._others or x.numel() == 0:
            return x
        first, *rest = self._exchange(x.contiguous())
        total = first.to(torch.float32, copy=True)
        for part in rest:
            total += part
        return x.copy_(total)

    def all_gather(self, x: Tensor) -> Tensor:
        """Join along the last dimension; see `TensorComm.all_gather`."""
        if not self._others:
            return x
        return torch.cat(self._exchange(x.contiguous()), dim=-1)

    def _exchange(self, own: Tensor) -> list[Tensor]:
        """Every rank's tensor in rank order; views that the next exchange overwrites."""
        parts = self._parts(own)
        requests = [self._comm.Irecv([as_bytes(parts[rank]), MPI.BYTE], rank) for rank in self._others]
        requests += [self._comm.Isend([as_bytes(own), MPI.BYTE], rank) for rank in self._others]
        self._waiter.until(lambda: MPI.Request.Testall(requests))
        return parts

    def _parts(self, own: Tensor) -> list[Tensor]:
        size = own.numel() * own.element_size()
        stride = -(-size // 64) * 64
        if self._arena.numel() < stride * self._comm.size:
            self._arena = torch.empty(stride * self._comm.size, dtype=torch.uint8)
        starts = range(0, stride * self._comm.size, stride)
        parts = [self._arena[start : start + size].view(own.dtype).view(own.shape) for start in starts]
        parts[self._comm.rank] = own
        return parts
