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

_ALIGNMENT = 64
_ONE_ROUND_BYTES = 128 * 1024


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

    @property
    def shared(self) -> None:
        return None

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum in place; see `TensorComm.all_reduce`."""
        if not self._others or x.numel() == 0:
            return x
        own = x.contiguous()
        if own.numel() * own.element_size() <= _ONE_ROUND_BYTES:
            self._sum_whole(own.view(-1))
        else:
            self._sum_by_shares(own.view(-1))
        return x if own is x else x.copy_(own)

    def all_gather(self, x: Tensor) -> Tensor:
        """Join along the last dimension; see `TensorComm.all_gather`."""
        if not self._others or x.numel() == 0:
            return x.repeat_interleave(self._comm.size, dim=-1)
        return torch.cat(self._gather(x.contiguous()), dim=-1)

    def gather(self, x: Tensor) -> Tensor:
        """Join along the last dimension on the first rank; see `TensorComm.gather`."""
        if not self._others or x.numel() == 0:
            return self.all_gather(x) if self._comm.rank == 0 else x
        own = x.contiguous()
        if self._comm.rank == 0:
            parts = self._slots(own)
            requests = [self._comm.Irecv([as_bytes(parts[rank]), MPI.BYTE], rank) for rank in self._others]
        else:
            requests = [self._comm.Isend([as_bytes(own), MPI.BYTE], 0)]
        self._waiter.until(lambda: MPI.Request.Testall(requests))
        return torch.cat(parts, dim=-1) if self._comm.rank == 0 else x

    def _sum_whole(self, x: Tensor) -> None:
        """One round: everyone gets everything. The fastest for small tensors."""
        x.copy_(_sum_in_order(self._gather(x)))

    def _sum_by_shares(self, x: Tensor) -> None:
        """Two rounds: each rank sums a share of the elements, then everyone gets the sums. Moves and adds the least."""
        shares = list(x.tensor_split(self._comm.size))
        own = shares[self._comm.rank]
        parts = self._slots(own)
        self._swap(shares, parts)
        own.copy_(_sum_in_order(parts))
        self._swap([own] * self._comm.size, shares)

    def _gather(self, own: Tensor) -> list[Tensor]:
        """Every rank's tensor in rank order; views that the next call overwrites."""
        parts = self._slots(own)
        self._swap([own] * self._comm.size, parts)
        return parts

    def _swap(self, outgoing: list[Tensor], incoming: list[Tensor]) -> None:
        """Send the r-th of `outgoing` to rank r, receive the r-th of `incoming` from it."""
        requests = [self._comm.Irecv([as_bytes(incoming[rank]), MPI.BYTE], rank) for rank in self._others]
        requests += [self._comm.Isend([as_bytes(outgoing[rank]), MPI.BYTE], rank) for rank in self._others]
        self._waiter.until(lambda: MPI.Request.Testall(requests))

    def _slots(self, own: Tensor) -> list[Tensor]:
        """Room for a tensor like `own` from each rank, with `own` itself in this rank's place."""
        size = own.numel() * own.element_size()
        stride = -(-size // _ALIGNMENT) * _ALIGNMENT
        if self._arena.numel() < stride * self._comm.size:
            self._arena = torch.empty(stride * self._comm.size, dtype=torch.uint8)
        starts = range(0, stride * self._comm.size, stride)
        slots = [self._arena[start : start + size].view(own.dtype).view(own.shape) for start in starts]
        slots[self._comm.rank] = own
        return slots


def _sum_in_order(parts: list[Tensor]) -> Tensor:
    """The float32 sum, added up from the first to the last."""
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    return total
