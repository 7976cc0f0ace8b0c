"""Memory that is there before it is needed."""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import suppress

import torch

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14: pages as if written to, their contents unchanged
_PIECE_BYTES = 4 * 2**20
"""At a time: other threads that map memory wait for it."""
_NICENESS = 10


class Prefault:
    """Keeps a CPU tensor in memory from its beginning on: `first` bytes, later `ahead` beyond what is in use.

    Otherwise the kernel clears each page within the iteration that uses it first, which took a seventh of the time of
    64 requests on a fresh server. What lies further ahead takes no memory. Without effect on older kernels.
    """

    def __init__(self, memory: torch.Tensor, first: int = 512 * 2**20, ahead: int = 128 * 2**20) -> None:
        self._memory = memory
        self._ahead = ahead
        self._end = min(first, memory.nbytes)
        self._thread: threading.Thread | None = None
        self._populate(0, self._end)

    def note_use(self, num_bytes: int) -> None:
        """The first `num_bytes` may be in use from now on. Never waits."""
        if min(num_bytes + self._ahead, self._memory.nbytes) <= self._end:
            return
        if self._thread is not None and self._thread.is_alive():
            return
        begin, self._end = self._end, min(num_bytes + 2 * self._ahead, self._memory.nbytes)
        self._thread = threading.Thread(target=self._follow, args=(begin, self._end), name="prefault", daemon=True)
        self._thread.start()

    def _follow(self, begin: int, end: int) -> None:
        with suppress(OSError):  # of this thread alone: it takes what the kernels leave
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        self._populate(begin, end)

    def _populate(self, begin: int, end: int) -> None:
        page = os.sysconf("SC_PAGE_SIZE")
        first = self._memory.data_ptr()
        for start in range(begin, end, _PIECE_BYTES):
            address = (first + start) // page * page
            size = first + min(start + _PIECE_BYTES, end) - address
            if _madvise(address, size, _POPULATE_WRITE) != 0:
                return


_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_madvise.restype = ctypes.c_int
