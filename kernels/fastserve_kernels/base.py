"""What all kernels share: the instruction set, the pool of threads, and how tensors become arguments."""

from __future__ import annotations

import ctypes
import weakref

from torch import Tensor

from fastserve_kernels.library import Library


class KernelBase:
    """One instruction set and one pool of threads. Calls from several threads run one after another."""

    def __init__(self, library: Library, num_threads: int, is_crowded: bool = False) -> None:
        self.isa = library.isa
        self.dot_order = library.dot_order
        """Kernels with the same order of summation give the same bits."""
        self.num_threads = num_threads
        self._library = library
        self._pool = library.handle.fs_pool_create(num_threads, is_crowded)
        weakref.finalize(self, library.handle.fs_pool_destroy, self._pool)

    def _run(self, operation: str, args: ctypes.Structure) -> None:
        self._library.operations[operation](self._pool, args)


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
