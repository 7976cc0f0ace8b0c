"""Which operations and number type a rank gets, and what it says of them."""

from __future__ import annotations

import builtins
from typing import Any

import pytest
import torch

from fastserve_hpc.ops import find_kernels, for_device, reference
from fastserve_hpc.ops.kernels import KernelOps

CPU = torch.device("cpu")


class Found:
    """Stands for kernels that are there."""

    isa = "avx512_bf16"
    num_threads = 3


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_kernels_compute_in_bfloat16(dtype: Any) -> None:
    chosen = for_device(CPU, dtype, Found())  # type: ignore[arg-type]
    assert isinstance(chosen.ops, KernelOps)
    assert chosen.dtype == torch.bfloat16
    assert chosen.description == "C++ kernels (AVX-512 bf16, bfloat16, 3 threads)"
    assert chosen.kernels is chosen.ops.kernels


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_types_stay_with_the_reference(dtype: Any) -> None:
    chosen = for_device(CPU, dtype, Found())  # type: ignore[arg-type]
    assert (chosen.ops, chosen.kernels) == (reference, None)
    assert chosen.dtype == getattr(torch, dtype)
    assert f"torch reference ({dtype})" in chosen.description


@pytest.mark.parametrize(("dtype", "expected"), [("auto", torch.float32), ("bfloat16", torch.bfloat16)])
def test_without_kernels_auto_is_exact_and_a_wish_is_kept(dtype: Any, expected: torch.dtype) -> None:
    chosen = for_device(CPU, dtype, "no compiler")
    assert (chosen.ops, chosen.dtype) == (reference, expected)
    assert chosen.description.endswith(", slower: no compiler")


def test_the_package_with_kernels_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without_kernels(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("fastserve_kernels"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_kernels)
    found = find_kernels(16, 64)
    assert (
        found
        == "the package fastserve_kernels is not installed; in a checkout, put its kernels directory on PYTHONPATH"
    )


def test_kernels_may_be_missing_or_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTSERVE_KERNELS_ISA", "none")
    assert "switched off" in str(find_kernels(16, 64))
    monkeypatch.delenv("FASTSERVE_KERNELS_ISA")
    monkeypatch.setenv("FASTSERVE_KERNELS_LIBRARY", "/nowhere/lib.so")
    assert "/nowhere/lib.so is missing" in str(find_kernels(16, 64))


@pytest.mark.parametrize(("block_size", "head_dim"), [(8, 64), (24, 64), (16, 72), (16, 8)])
def test_blocks_that_do_not_fit_are_named(block_size: int, head_dim: int) -> None:
    reason = find_kernels(block_size, head_dim)
    assert f"--block-size (here {block_size})" in str(reason)
    assert f"head size (here {head_dim})" in str(reason)
