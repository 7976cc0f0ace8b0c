"""The operations over the C++ kernels, for bf16 on the CPU. See `interface.Ops` for shapes.

They sum in float32 and in one fixed order: a row's bits depend neither on its neighbours nor on how a prompt was cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastserve_hpc.ops import reference
from fastserve_hpc.ops.interface import (
    Activation,
    AttentionBatch,
    LayerShape,
    LayerStack,
    LayerWeights,
    Norm,
    Rope,
    WeightRows,
)

if TYPE_CHECKING:
    from fastserve_kernels.decoder import DecoderStack
    from fastserve_kernels.kernels import Kernels
    from fastserve_kernels.packing import PackedLinear
    from fastserve_kernels.shared import SharedGroup


_GATED = ("silu_mul", "gelu_tanh_mul")


@dataclass(frozen=True, slots=True)
class Linear:
    """A packed weight, and what follows it."""

    packed: PackedLinear
    activation: Activation


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The tensors of a batch that attention reads."""

    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64
    block_tables: Tensor  # [S, max_blocks] int32
    query_start: Tensor  # [S + 1] int32
    seq_lens: Tensor  # [S] int32


class KernelOps:
    """`Ops` of one instruction set and its pool of threads."""

    def __init__(self, kernels: Kernels) -> None:
        from fastserve_kernels.abi import Activation as Code

        self.kernels = kernels
        self._codes: Mapping[Activation, Code] = {
            "none": Code.NONE,
            "silu_mul": Code.SILU_MUL,
            "gelu_tanh_mul": Code.GELU_TANH_MUL,
            "relu": Code.RELU,
        }

    def pack_linear(
        self, weight: Tensor | WeightRows, bias: Tensor | None = None, activation: Activation = "none"
    ) -> Linear:
        from fastserve_kernels.packing import packed_bias

        num_rows, num_inputs = weight.shape
        is_gated = activation in _GATED
        halves = bias.chunk(2) if bias is not None and is_gated else (bias, None)
        packed_biases = packed_bias(halves[0], halves[1], is_gated)
        num_outputs = num_rows // 2 if is_gated else num_rows
        packed = self.kernels.new_linear(num_outputs, num_inputs, packed_biases, is_gated=is_gated)
        for first, rows in [(0, weight)] if isinstance(weight, Tensor) else weight.pieces():
            self._pack_rows(packed, first, rows)
        return Linear(packed, activation)

    def _pack_rows(self, packed: PackedLinear, first: int, rows: Tensor) -> None:
        """Rows of a weight that, where it is gated, has all of the gate's before those of up."""
        count = packed.num_outputs
        num_before = min(max(count - first, 0), len(rows))
        if num_before:
            self.kernels.pack_rows(packed, first, rows[:num_before])
        if num_before < len(rows):
            self.kernels.pack_rows(packed, first + num_before - count, rows[num_before:], is_up=True)

    def linear(
        self,
        x: Tensor,
        weight: Linear,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        if norm is not None and norm.bias is not None:
            x, norm = self.normalize(x, norm), None
        return self.kernels.linear(
            x,
            weight.packed,
            norm_weight=None if norm is None else norm.weight,
            eps=0.0 if norm is None else norm.eps,
            activation=self._codes[weight.activation],
            residual=residual,
            out_dtype=out_dtype or x.dtype,
        )

    def normalize(self, x: Tensor, norm: Norm) -> Tensor:
        """In torch, which takes each row by itself: the same bits in any batch."""
        return reference.normalize(x, norm)

    def embedding(
        self, ids: Tensor, weight: Tensor | Linear, scale: float = 1.0, first_id: int | None = None
    ) -> Tensor:
        table = weight.packed if isinstance(weight, Linear) else weight
        return self.kernels.embedding(ids, table, scale=scale, first_id=first_id or 0)

    def most_likely(self, logits: Tensor) -> Tensor:
        return self.kernels.argmax(logits)

    def plan_attention(self, batch: AttentionBatch, kv_layer: Tensor) -> AttentionPlan:
        del kv_layer  # Blocks are found as the attention goes.
        return AttentionPlan(batch.positions, batch.slot_ids, batch.block_tables, batch.query_start, batch.seq_lens)

    def rope_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_layer: Tensor,
        plan: AttentionPlan,
        rope: Rope | None,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
    ) -> Tensor:
        flat_q, flat_k, flat_v = (part.view(len(part), -1) for part in (q, k, v))
        self.kernels.rope_store(
            flat_q,
            flat_k,
            flat_v,
            kv_layer,
            plan.positions,
            plan.slots,
            cos=None if rope is None else rope.cos,
            sin=None if rope is None else rope.sin,
            q_norm=_weight(q_norm),
            k_norm=_weight(k_norm),
            norm_eps=0.0 if q_norm is None else q_norm.eps,
        )
        return q

    def paged_attention(
        self,
        q: Tensor,
        kv_layer: Tensor,
        plan: AttentionPlan,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Tensor:
        out = q.new_empty(len(q), q.shape[1] * q.shape[2])
        self.kernels.paged_attention(
            q.view(out.shape),
            kv_layer,
            plan.block_tables,
            plan.query_start,
            plan.seq_lens,
            scale=scale,
            window=window,
            softcap=softcap,
            out=out,
        )
        return out.view(q.shape)

    def stack_layers(
        self, layers: Sequence[LayerWeights], shape: LayerShape, shared: SharedGroup | None
    ) -> LayerStack | None:
        from fastserve_kernels.decoder import DecoderLayer, DecoderShape, DecoderStack

        common = DecoderShape(
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            norm_eps=layers[0].mlp_norm.eps,
            scale=shape.scale,
            softcap=shape.softcap,
            activation=self._codes[shape.activation],
        )
        stacked = [
            DecoderLayer(
                input_norm=layer.attention_norm.weight,
                qkv=layer.qkv.packed,
                out=layer.out.packed,
                mlp_norm=layer.mlp_norm.weight,
                gate_up=layer.gate_up.packed,
                down=layer.down.packed,
                cos=layer.rope.cos,
                sin=layer.rope.sin,
                q_norm=_weight(layer.q_norm),
                k_norm=_weight(layer.k_norm),
                attention_out_norm=_weight(layer.attention_out_norm),
                mlp_out_norm=_weight(layer.mlp_out_norm),
                window=layer.window,
            )
            for layer in layers
        ]
        return _KernelStack(self.kernels, DecoderStack(stacked, common, shared))


class _KernelStack:
    """`LayerStack` in one call of the kernels."""

    def __init__(self, kernels: Kernels, stack: DecoderStack) -> None:
        self._kernels = kernels
        self._stack = stack

    def __call__(self, hidden: Tensor, kv_layers: Tensor, plan: AttentionPlan, layers: range) -> Tensor:
        return self._kernels.decoder_layers(
            self._stack,
            hidden,
            kv_layers,
            plan.positions,
            plan.slots,
            plan.block_tables,
            plan.query_start,
            plan.seq_lens,
            first=layers.start,
            last=layers.stop,
        )


def _weight(norm: Norm | None) -> Tensor | None:
    return None if norm is None else norm.weight
