"""The kernels as functions of torch tensors. All on the CPU; rows may be strided, the last dimension is contiguous."""

from __future__ import annotations

import ctypes
import weakref

import torch
from torch import Tensor

from fastserve_kernels.abi import Activation, LinearArgs, PackArgs
from fastserve_kernels.library import Library
from fastserve_kernels.packing import PANEL, PackedLinear, WeightArena, packed_bias, round_up

GATED = (Activation.SILU_MUL, Activation.GELU_TANH_MUL)


class Kernels:
    """One instruction set and one pool of threads. Calls from several threads run one after another."""

    def __init__(self, library: Library, num_threads: int) -> None:
        self.isa = library.isa
        self.dot_order = library.dot_order
        """Kernels with the same order of summation give the same bits."""
        self.num_threads = num_threads
        self._library = library
        self._pool = library.handle.fs_pool_create(num_threads)
        self._arena = WeightArena()
        self._linear = library.operations["linear"]
        weakref.finalize(self, library.handle.fs_pool_destroy, self._pool)

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None = None, *, up: Tensor | None = None, up_bias: Tensor | None = None
    ) -> PackedLinear:
        """Copies bf16 `weight` [n, k] into the kernels' layout; with `up` [n, k] the two halves of a gated MLP."""
        for part in (weight, up):
            _check(part is None or (part.dtype == torch.bfloat16 and part.stride(-1) == 1), "weights must be bf16 rows")
        _check(up is None or up.shape == weight.shape, "gate and up must have one shape")
        n, k = weight.shape
        per_panel = PANEL if up is None else PANEL // 2
        data = self._arena.take(round_up(n, per_panel) // per_panel * PANEL * round_up(k, PANEL))
        args = PackArgs(
            weight=weight.data_ptr(),
            up=_pointer(up),
            packed=data.data_ptr(),
            ld_weight=weight.stride(0),
            ld_up=0 if up is None else up.stride(0),
            n=n,
            k=k,
        )
        self._library.handle.fs_pack(self._pool, ctypes.byref(args))
        return PackedLinear(data, packed_bias(bias, up_bias, up is not None), n, k, up is not None)

    def linear(
        self,
        x: Tensor,
        weight: PackedLinear,
        *,
        norm_weight: Tensor | None = None,
        eps: float = 0.0,
        activation: Activation = Activation.NONE,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
    ) -> Tensor:
        """activation(rms_norm(x) W^T + bias) + residual: bf16 `x` [rows, k] -> `out` [rows, n], bf16 or float32.

        `norm_weight` (float32 [k]) switches the norm on. `residual` (bf16 [rows, n]) may be `out`. A row's result does
        not depend on the other rows, on their number or on the number of threads.
        """
        rows = x.shape[0]
        if out is None:
            out = x.new_empty(rows, weight.num_outputs, dtype=out_dtype)
        _check(x.dtype == torch.bfloat16 and x.shape[1] == weight.num_inputs, "x must be bf16 [rows, num_inputs]")
        _check((activation in GATED) == weight.gated, "a gated activation needs a weight packed with up, and only it")
        _check(out.shape == (rows, weight.num_outputs), "out must be [rows, num_outputs]")
        _check(x.stride(1) == 1 and out.stride(1) == 1, "the last dimension must be contiguous")
        args = LinearArgs(
            x=x.data_ptr(),
            weight=weight.data.data_ptr(),
            bias=_pointer(weight.bias),
            norm_weight=_pointer(norm_weight),
            residual=_pointer(residual),
            out=out.data_ptr(),
            ld_x=x.stride(0),
            ld_residual=0 if residual is None else residual.stride(0),
            ld_out=out.stride(0),
            rows=rows,
            k=weight.num_inputs,
            n=weight.num_outputs,
            eps=eps,
            activation=activation,
            out_is_float=out.dtype == torch.float32,
        )
        self._linear(self._pool, args)
        return out


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
