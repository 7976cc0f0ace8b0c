"""Memory made ready ahead of its use, as the kernel sees it."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

from fastserve_hpc.worker.prefault import Prefault

MIB = 2**20


def untouched(num_bytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


def resident(memory: torch.Tensor) -> list[bool]:
    """Of each whole MiB: whether its pages are in memory."""
    first = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    num_pages = (memory.data_ptr() + memory.nbytes - first) // mmap.PAGESIZE
    pages = (ctypes.c_ubyte * num_pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(num_pages * mmap.PAGESIZE), pages) == 0
    per_mib = MIB // mmap.PAGESIZE
    return [all(page & 1 for page in pages[i : i + per_mib]) for i in range(0, num_pages - per_mib + 1, per_mib)]


@pytest.fixture
def memory() -> torch.Tensor:
    memory = untouched(512 * MIB)
    assert not any(resident(memory))
    return memory


def join(prefault: Prefault) -> None:
    assert prefault._thread is not None
    prefault._thread.join()


def test_the_beginning_is_there_at_once_and_the_rest_follows_what_is_used(memory: torch.Tensor) -> None:
    prefault = Prefault(memory, first=64 * MIB, ahead=32 * MIB)
    assert all(resident(memory)[:63])
    assert not any(resident(memory)[68:])

    prefault.note_use(16 * MIB)  # 48 are left, more than 32
    assert prefault._thread is None

    prefault.note_use(40 * MIB)
    join(prefault)
    assert all(resident(memory)[:103])
    assert not any(resident(memory)[108:])

    prefault.note_use(500 * MIB)
    join(prefault)
    assert all(resident(memory))
    thread = prefault._thread
    prefault.note_use(512 * MIB)
    assert prefault._thread is thread


def test_what_was_written_stays(memory: torch.Tensor) -> None:
    memory[70 * MIB : 80 * MIB] = 7
    prefault = Prefault(memory, first=64 * MIB, ahead=32 * MIB)
    prefault.note_use(60 * MIB)
    join(prefault)
    assert int(memory[64 * MIB : 124 * MIB].sum()) == 7 * 10 * MIB


def test_more_than_there_is() -> None:
    memory = untouched(5 * MIB + 1000)  # no whole number of pieces nor of pages
    prefault = Prefault(memory, first=10 * MIB)
    assert resident(memory) == [True] * 5
    prefault.note_use(10 * MIB)
    assert prefault._thread is None

    nothing = Prefault(torch.empty(0))
    nothing.note_use(0)
    assert nothing._thread is None
