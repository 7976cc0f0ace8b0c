"""Packing weights, and the linear over them."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fastserve_kernels.abi import Activation, LinearArgs, PackArgs
from fastserve_kernels.base import KernelBase, check, pointer
from fastserve_kernels.library import Library
from fastserve_kernels.packing import PANEL, PackedLinear, WeightArena, packed_bias, round_up

GATED = (Activation.SILU_MUL, Activation.GELU_TANH_MUL)


class LinearKernels(KernelBase):
    """y = activation(rms_norm(x) W^T + bias) + residual."""

    def __init__(self, library: Library, num_threads: int) -> None:
        super().__init__(library, num_threads)
        self._arena = WeightArena()

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None = None, *, up: Tensor | None = None, up_bias: Tensor | None = None
    ) -> PackedLinear:
        """Copies bf16 `weight` [n, k] into the kernels' layout; with `up` [n, k] the two halves of a gated MLP.

        Several threads may pack at the same time.
        """
        for part in (weight, up):
            check(part is None or (part.dtype == torch.bfloat16 and part.stride(-1) == 1), "weights must be bf16 rows")
        check(up is None or up.shape == weight.shape, "gate and up must have one shape")
        n, k = weight.shape
        per_panel = PANEL if up is None else PANEL // 2
        data = self._arena.take(round_up(n, per_panel) // per_panel * PANEL * round_up(k, PANEL))
        args = PackArgs(
            weight=weight.data_ptr(),
            up=pointer(up),
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
        check(x.dtype == torch.bfloat16 and x.shape[1] == weight.num_inputs, "x must be bf16 [rows, num_inputs]")
        check((activation in GATED) == weight.gated, "a gated activation needs a weight packed with up, and only it")
        check(residual is None or not weight.gated, "a gated linear takes no residual")
        check(out.shape == (rows, weight.num_outputs), "out must be [rows, num_outputs]")
        check(x.stride(1) == 1 and out.stride(1) == 1, "the last dimension must be contiguous")
        check(out.data_ptr() != x.data_ptr() or rows == 0, "out must not be x")
        args = LinearArgs(
            x=x.data_ptr(),
            weight=weight.data.data_ptr(),
            bias=pointer(weight.bias),
            norm_weight=pointer(norm_weight),
            residual=pointer(residual),
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
        self._run("linear", args)
        return out
