"""Which implementation of the operations a rank computes with, and in which number type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fastserve_hpc.config import DType
from fastserve_hpc.ops import reference
from fastserve_hpc.ops.interface import Ops
from fastserve_hpc.ops.kernels import KernelOps

if TYPE_CHECKING:
    from fastserve_kernels.kernels import Kernels

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_INSTRUCTION_SETS = {"amx": "AMX", "avx512_bf16": "AVX-512 bf16", "avx512": "AVX-512", "avx2": "AVX2"}


@dataclass(frozen=True, slots=True)
class Chosen:
    """The operations, the number type of weights and activations, and a line that tells users of both."""

    ops: Ops
    dtype: torch.dtype
    description: str
    kernels: Kernels | None = None
    """What the operations run on, where these are the C++ kernels."""


def find_kernels(
    block_size: int, head_dim: int, num_threads: int | None = None, is_crowded: bool = False
) -> Kernels | str:
    """The C++ kernels with a pool of `num_threads`, or why there are none for KV blocks of this shape.

    `is_crowded`: other ranks want the cores of threads that wait. The package with them is optional, as is a compiler
    when it is installed.
    """
    try:
        from fastserve_kernels import KernelsUnavailableError, open_kernels
        from fastserve_kernels.attention import supports_cache
    except ImportError:
        return "the package fastserve_kernels is not installed; in a checkout, put its kernels directory on PYTHONPATH"
    if not supports_cache(block_size, head_dim):
        return (
            f"the C++ kernels want multiples of 16 for --block-size (here {block_size}) "
            f"and the model's head size (here {head_dim})"
        )
    try:
        return open_kernels(num_threads=num_threads, is_crowded=is_crowded)
    except KernelsUnavailableError as error:
        return str(error)


def for_device(device: torch.device, dtype: DType = "float32", kernels: Kernels | str = "not looked for") -> Chosen:
    """What to compute with on `device`; `kernels` are those of `find_kernels`, or why there are none.

    "auto" is bfloat16 where it is quick and exact enough: on a GPU that multiplies it, on a CPU with the kernels,
    which sum in float32 and give the same bits in any batch. Elsewhere it is float32.
    """
    if device.type != "cpu":
        quick = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        chosen = _named(dtype, torch.bfloat16 if quick else torch.float32)
        return Chosen(reference, chosen, f"torch ({_NAMES[chosen]})")
    if isinstance(kernels, str):
        chosen = _named(dtype, torch.float32)
        return Chosen(reference, chosen, f"torch reference ({_NAMES[chosen]}), slower: {kernels}")
    chosen = _named(dtype, torch.bfloat16)
    if chosen != torch.bfloat16:
        return Chosen(
            reference, chosen, f"torch reference ({_NAMES[chosen]}), slower: the C++ kernels are for bfloat16"
        )
    name = _INSTRUCTION_SETS.get(kernels.isa, kernels.isa)
    threads = "1 thread" if kernels.num_threads == 1 else f"{kernels.num_threads} threads"
    return Chosen(KernelOps(kernels), chosen, f"C++ kernels ({name}, bfloat16, {threads})", kernels)


def _named(dtype: DType, automatic: torch.dtype) -> torch.dtype:
    return automatic if dtype == "auto" else _DTYPES[dtype]
