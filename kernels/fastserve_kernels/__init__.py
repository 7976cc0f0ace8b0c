"""C++ kernels for CPUs: bf16 linears, paged attention and the small operations round them.

    kernels = load()            # None without a built library or on a processor that none of them fits
    weight = kernels.pack_linear(w)
    y = kernels.linear(x, weight)

`open_kernels()` does the same and raises KernelsUnavailableError, which says why. Importing this package loads neither
torch nor the library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastserve_kernels.library import KernelsUnavailableError

if TYPE_CHECKING:
    from fastserve_kernels.kernels import Kernels

__all__ = ["KernelsUnavailableError", "load", "open_kernels"]


def open_kernels(isa: str | None = None, num_threads: int | None = None, is_crowded: bool = False) -> Kernels:
    """The kernels of instruction set `isa` (amx, avx512_bf16, avx512, avx2; default: the best this machine has).

    The environment's FASTSERVE_KERNELS_ISA decides where `isa` is not given ("none" switches them off).
    `num_threads` defaults to the processors this process may use; with `is_crowded`, where other processes compute on
    them, too, threads that wait sleep sooner. Raises KernelsUnavailableError.
    """
    from fastserve_kernels.kernels import Kernels
    from fastserve_kernels.library import open_library, processors

    return Kernels(open_library(isa), num_threads or processors(), is_crowded)


def load(isa: str | None = None, num_threads: int | None = None) -> Kernels | None:
    """Like open_kernels, but None where there are no kernels."""
    try:
        return open_kernels(isa, num_threads)
    except KernelsUnavailableError:
        return None
