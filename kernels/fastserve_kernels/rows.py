"""Operations on rows: norms, gates, gathers, the largest of a row, copies of KV blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from fastserve_kernels.abi import Activation, ArgmaxArgs, CopyBlocksArgs, EmbeddingArgs, GateMulArgs, RmsNormArgs
from fastserve_kernels.base import KernelBase, check, pointer
from fastserve_kernels.packing import PackedLinear


class RowKernels(KernelBase):
    """All on [rows, n] with contiguous last dimension."""

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """x / rms(x) * weight; with `residual`, that first becomes residual + x and is what is normalised.

        `x`, `residual`, `out` (may be x): bf16 [rows, n]; `weight` float32 [n].
        """
        out = x.new_empty(x.shape) if out is None else out
        _check_rows(x, out, residual)
        check(weight.dtype == torch.float32 and weight.shape == x.shape[1:], "weight must be float32 [n]")
        args = RmsNormArgs(
            x=x.data_ptr(),
            residual=pointer(residual),
            weight=weight.data_ptr(),
            out=out.data_ptr(),
            ld_x=x.stride(0),
            ld_residual=0 if residual is None else residual.stride(0),
            ld_out=out.stride(0),
            rows=x.shape[0],
            n=x.shape[1],
            eps=eps,
        )
        self._run("rms_norm", args)
        return out

    def gate_mul(
        self, gate: Tensor, up: Tensor, activation: Activation = Activation.SILU_MUL, *, out: Tensor | None = None
    ) -> Tensor:
        """activation(gate) * up, all bf16 [rows, n]; `activation` is one of the gated ones."""
        out = gate.new_empty(gate.shape) if out is None else out
        _check_rows(gate, up, out)
        args = GateMulArgs(
            gate=gate.data_ptr(),
            up=up.data_ptr(),
            out=out.data_ptr(),
            ld_gate=gate.stride(0),
            ld_up=up.stride(0),
            ld_out=out.stride(0),
            rows=gate.shape[0],
            n=gate.shape[1],
            activation=activation,
        )
        self._run("gate_mul", args)
        return out

    def embedding(
        self,
        ids: Tensor,
        table: Tensor | PackedLinear,
        *,
        first_id: int = 0,
        scale: float = 1.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """Rows of bf16 `table` [num_rows, n], which holds ids from `first_id` on; zeros for other ids.

        `table` may be the packed weight of a tied head, so that there is one copy of it.
        """
        if isinstance(table, PackedLinear):
            check(not table.gated, "a gated weight is no table of embeddings")
            rows, num_rows, n, stride = table.data, table.num_outputs, table.num_inputs, 0
        else:
            rows, num_rows, n, stride = table, *table.shape, table.stride(0)
            check(table.dtype == torch.bfloat16 and table.stride(1) == 1, "table must be bf16 rows")
        out = rows.new_empty(ids.shape[0], n) if out is None else out
        check(ids.dtype == torch.int64 and ids.is_contiguous(), "ids must be int64")
        check(out.dtype == torch.bfloat16 and out.stride(1) == 1 and out.shape[1] == n, "out must be bf16 [ids, n]")
        args = EmbeddingArgs(
            table=rows.data_ptr(),
            ids=ids.data_ptr(),
            out=out.data_ptr(),
            ld_table=stride,
            ld_out=out.stride(0),
            first_id=first_id,
            num_rows=num_rows,
            num_ids=ids.shape[0],
            n=n,
            scale=scale,
        )
        self._run("embedding", args)
        return out

    def argmax(self, x: Tensor) -> Tensor:
        """int64 [rows]: where each row of float32 `x` [rows, n] is largest, the first such place.

        -1 where the largest is not finite or a NaN is in the row.
        """
        check(x.dtype == torch.float32 and x.stride(1) == 1, "x must be float32 rows")
        out = torch.empty(x.shape[0], dtype=torch.int64)
        self._run("argmax", ArgmaxArgs(x.data_ptr(), out.data_ptr(), x.stride(0), x.shape[0], x.shape[1]))
        return out

    def copy_blocks(self, source: Tensor, target: Tensor, pairs: Tensor) -> None:
        """target[pairs[i, 1]] = source[pairs[i, 0]]; `pairs` int64 [n, 2], no target twice, both contiguous."""
        check(source.is_contiguous() and target.is_contiguous(), "block tensors must be contiguous")
        check(source.shape[1:] == target.shape[1:] and source.dtype == target.dtype, "blocks must be of one shape")
        check(pairs.dtype == torch.int64 and pairs.is_contiguous(), "pairs must be int64 [n, 2]")
        if pairs.shape[0] == 0:
            return
        low, high = pairs.amin(0).tolist(), pairs.amax(0).tolist()
        check(min(low) >= 0 and high[0] < source.shape[0] and high[1] < target.shape[0], "a block is out of range")
        block_bytes = source[0].numel() * source.element_size()
        args = CopyBlocksArgs(source.data_ptr(), target.data_ptr(), pairs.data_ptr(), block_bytes, pairs.shape[0])
        self._run("copy_blocks", args)


def _check_rows(*tensors: Tensor | None) -> None:
    shape = next(tensor.shape for tensor in tensors if tensor is not None)
    for tensor in tensors:
        if tensor is not None:
            check(tensor.dtype == torch.bfloat16 and tensor.shape == shape, "rows must be bf16 and of one shape")
            check(tensor.stride(1) == 1, "the last dimension must be contiguous")
