"""Sums and gathers among the processes of one node through shared memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
from pathlib import Path

import torch
from torch import Tensor

from fastserve_kernels.abi import AllGatherArgs, AllReduceArgs, SharedGroupState
from fastserve_kernels.base import KernelBase, check

DEFAULT_SLOT_BYTES = 2 << 20
_LOOKS, _LOOKS_CROWDED = 400, 40
"""At a rank that is late, before sleeping: some 20 us, and 2 where the core is then needed by a rank that has none."""


def create_segment(num_ranks: int, slot_bytes: int = DEFAULT_SLOT_BYTES, directory: Path = Path("/dev/shm")) -> Path:
    """A new file of zeros, readable by this user only, for SharedGroup; whoever made it unlinks it once all have
    opened it. Raises OSError when the file system has no room."""
    path = directory / f"fastserve-{os.getpid()}-{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        # Allocated now: a sparse file on a full file system would kill the process at its first write.
        os.posix_fallocate(descriptor, 0, _segment_bytes(num_ranks, slot_bytes))
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)
    return path


def _segment_bytes(num_ranks: int, slot_bytes: int) -> int:
    return num_ranks * 64 + 2 * num_ranks * slot_bytes


class SharedGroup:
    """One rank's view of a segment. All ranks make the same calls in the same order.

    `is_crowded`: there are more ranks than cores, so that waiting must not keep a core for long.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        num_ranks: int,
        slot_bytes: int = DEFAULT_SLOT_BYTES,
        is_crowded: bool = False,
    ) -> None:
        check(0 <= rank < num_ranks, f"rank {rank} is not in 0..{num_ranks - 1}")
        check(slot_bytes > 0 and slot_bytes % 64 == 0, f"slot_bytes {slot_bytes} is not a multiple of 64")
        size = _segment_bytes(num_ranks, slot_bytes)
        with open(path, "r+b") as file:
            check(os.fstat(file.fileno()).st_size == size, f"{path} is not a segment of {size} bytes")
            self._mapping = mmap.mmap(file.fileno(), size)
        self._memory = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self.rank = rank
        self.num_ranks = num_ranks
        self.state = SharedGroupState(
            self._memory.data_ptr(),
            rank,
            num_ranks,
            slot_bytes,
            num_looks=_LOOKS_CROWDED if is_crowded else _LOOKS,
        )


class SharedKernels(KernelBase):
    """Waits spin briefly, then sleep; the interpreter lock is free meanwhile."""

    def all_reduce(self, x: Tensor, group: SharedGroup) -> Tensor:
        """Contiguous bf16 or float32 `x` becomes the sum over ranks: in float32, in rank order, rounded once."""
        check(x.dtype in (torch.bfloat16, torch.float32) and x.is_contiguous(), "x must be contiguous bf16 or float32")
        args = AllReduceArgs(ctypes.pointer(group.state), x.data_ptr(), x.numel(), x.dtype == torch.float32)
        self._run("all_reduce", args)
        return x

    def gather(self, x: Tensor, group: SharedGroup) -> Tensor | None:
        """`all_gather` for the first rank alone: None on the others."""
        if group.rank == 0:
            return self.all_gather(x, group)
        check(x.is_contiguous() and x.dim() == 2, "x must be contiguous [rows, n]")
        row_bytes = x.shape[1] * x.element_size()
        self._run("all_gather", AllGatherArgs(ctypes.pointer(group.state), x.data_ptr(), None, x.shape[0], row_bytes))
        return None

    def all_gather(self, x: Tensor, group: SharedGroup, *, out: Tensor | None = None) -> Tensor:
        """Contiguous `x` [rows, n] of every rank side by side, in rank order: [rows, num_ranks * n]."""
        check(x.is_contiguous() and x.dim() == 2, "x must be contiguous [rows, n]")
        rows, n = x.shape
        out = x.new_empty(rows, group.num_ranks * n) if out is None else out
        check(out.is_contiguous() and out.shape == (rows, group.num_ranks * n), "out must be [rows, num_ranks * n]")
        row_bytes = n * x.element_size()
        args = AllGatherArgs(ctypes.pointer(group.state), x.data_ptr(), out.data_ptr(), rows, row_bytes)
        self._run("all_gather", args)
        return out
