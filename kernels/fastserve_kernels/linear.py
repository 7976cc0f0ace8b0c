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

    def __init__(self, library: Library, num_threads: int, is_crowded: bool = False) -> None:
        super().__init__(library, num_threads, is_crowded)
        self._arena = WeightArena()

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None = None, *, up: Tensor | None = None, up_bias: Tensor | None = None
    ) -> PackedLinear:
        """Copies bf16 `weight` [n, k] into the kernels' layout; with `up` [n, k] the two halves of a gated MLP.

        Several threads may pack at the same time.
        """
        check(up is None or up.shape == weight.shape, "gate and up must have one shape")
        n, k = weight.shape
        packed = self.new_linear(n, k, packed_bias(bias, up_bias, up is not None), is_gated=up is not None)
        self.pack_rows(packed, 0, weight)
        if up is not None:
            self.pack_rows(packed, 0, up, is_up=True)
        return packed

    def new_linear(self, n: int, k: int, bias: Tensor | None, *, is_gated: bool) -> PackedLinear:
        """A weight [n, k] of zeros for `pack_rows`; `bias` as from `packed_bias`."""
        per_panel = PANEL // 2 if is_gated else PANEL
        data = self._arena.take(round_up(n, per_panel) // per_panel * PANEL * round_up(k, PANEL))
        return PackedLinear(data, bias, n, k, is_gated)

    def pack_rows(self, packed: PackedLinear, first: int, rows: Tensor, *, is_up: bool = False) -> None:
        """Copies bf16 `rows` [m, k] to the outputs first..first+m-1: those of a gated weight's gate, or of its up.

        Quickest where `first` and m are multiples of 16. Several threads may do it at the same time.
        """
        check(rows.dtype == torch.bfloat16 and rows.stride(-1) == 1, "weights must be bf16 rows")
        check(rows.shape[1] == packed.num_inputs, "rows must be [m, num_inputs]")
        check(0 <= first <= first + len(rows) <= packed.num_outputs, "there are not so many outputs")
        check(packed.gated or not is_up, "only a gated weight has a second half")
        args = PackArgs(
            rows=rows.data_ptr(),
            packed=packed.data.data_ptr(),
            ld_rows=rows.stride(0),
            first=first,
            num_rows=len(rows),
            k=packed.num_inputs,
            per_panel=PANEL // 2 if packed.gated else PANEL,
            lane=PANEL // 2 if is_up else 0,
        )
        self._library.handle.fs_pack(ctypes.byref(args))

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
