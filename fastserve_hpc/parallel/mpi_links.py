"""The links between pipeline stages over MPI, for tensors in host memory.

No headers: the receiver knows from the plan what comes, and plans are in order on every rank. Two buffers on each side,
so that one tensor can travel while another is computed on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastserve_hpc.errors import RankError
from fastserve_hpc.parallel.idle import Waiter
from fastserve_hpc.parallel.mpi_api import MPI
from fastserve_hpc.parallel.mpi_group import as_bytes

_NUM_BUFFERS = 2


class _Buffers:
    """Host buffers used in turn, each with the request that last used it."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = [torch.empty(num_bytes, dtype=torch.uint8) for _ in range(_NUM_BUFFERS)]
        self.requests = [MPI.REQUEST_NULL] * _NUM_BUFFERS
        self.turn = 0

    def advance(self) -> None:
        self.turn = (self.turn + 1) % _NUM_BUFFERS


class SendLink:
    """Sends hidden states of at most `max_bytes` to `rank`, never waiting for more than a free buffer."""

    def __init__(self, comm: MPI.Intracomm, rank: int, max_bytes: int, waiter: Waiter) -> None:
        self._comm = comm
        self._rank = rank
        self._waiter = waiter
        self._buffers = _Buffers(max_bytes)

    def send(self, x: Tensor) -> None:
        """Copy `x` and start sending it."""
        buffers = self._buffers
        self._waiter.until(buffers.requests[buffers.turn].Test)
        size = _checked_size(x.numel() * x.element_size(), buffers.memory[0].numel())
        target = buffers.memory[buffers.turn][:size]
        target.view(x.dtype).view(x.shape).copy_(x)
        buffers.requests[buffers.turn] = self._comm.Isend([as_bytes(target), MPI.BYTE], self._rank)
        buffers.advance()

    def progress(self) -> None:
        """Move what is under way: a large message otherwise leaves only when this rank next waits."""
        MPI.Request.Testall(self._buffers.requests)

    def flush(self) -> None:
        """Wait until everything has left."""
        self._waiter.until(lambda: MPI.Request.Testall(self._buffers.requests))


class RecvLink:
    """Receives hidden states of at most `max_bytes` from `rank` into receives that are posted ahead."""

    def __init__(self, comm: MPI.Intracomm, rank: int, max_bytes: int, waiter: Waiter) -> None:
        self._comm = comm
        self._rank = rank
        self._waiter = waiter
        self._buffers = _Buffers(max_bytes)
        self._in_use: int | None = None
        self._status = MPI.Status()
        for index in range(_NUM_BUFFERS):
            self._post(index)

    def receive(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> Tensor:
        """The next hidden state, valid until the next call; see `TensorComm.recv_prev`."""
        if self._in_use is not None:
            self._post(self._in_use)
        buffers = self._buffers
        index = buffers.turn
        size = _checked_size(num_tokens * hidden_size * dtype.itemsize, buffers.memory[0].numel())
        self._waiter.until(lambda: buffers.requests[index].Test(self._status))
        self._check_received(size)
        self._in_use = index
        buffers.advance()
        return buffers.memory[index][:size].view(dtype).view(num_tokens, hidden_size)

    def progress(self) -> None:
        """Move what is arriving, without taking its status from `receive`."""
        self._comm.Iprobe(self._rank)

    def close(self) -> None:
        """Take back the receives that were posted ahead."""
        for request in self._buffers.requests:
            if request != MPI.REQUEST_NULL:
                request.Cancel()
                request.Wait()

    def _post(self, index: int) -> None:
        memory = self._buffers.memory[index]
        self._buffers.requests[index] = self._comm.Irecv([as_bytes(memory), MPI.BYTE], self._rank)

    def _check_received(self, size: int) -> None:
        received = self._status.Get_count(MPI.BYTE)
        if received != size:
            raise RankError(
                f"stage link from rank {self._rank}: {received} bytes came, the plan says {size}: ranks are out of step"
            )


def _checked_size(size: int, limit: int) -> int:
    if size > limit:
        raise ValueError(f"a hidden state of {size} bytes is over the stage link's {limit}")
    return size
