"""The decoder that all families share: one rank's part of it, from token ids or hidden states to the next stage's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fastserve_hpc.models.layers import (
    ColumnParallelLinear,
    Outputs,
    RowParallelLinear,
    Shard,
    VocabEmbedding,
    VocabHead,
    read_norm,
)
from fastserve_hpc.models.spec import ModelSpec
from fastserve_hpc.models.weights import WeightReader
from fastserve_hpc.ops import AttentionBatch, LayerShape, LayerStack, LayerWeights, Norm, Rope

_TOKENS_AT_ONCE = 256
"""Layers times tokens between two calls of `comm.progress`: some milliseconds of a small model's time."""


class ModelBatch(AttentionBatch, Protocol):
    """What a model reads of `worker.batch.Batch`: T tokens, of which R rows need logits."""

    @property
    def token_ids(self) -> Tensor:
        """[T] int64."""

    @property
    def sample_rows(self) -> Tensor:
        """[R] int64."""


class LayeredCache(Protocol):
    """What a model needs of `worker.kv_cache.KVCache`."""

    @property
    def layers(self) -> Tensor:
        """[num_blocks, layers, 2, kv_heads, block_size, head_dim] of this stage's layers."""

    def layer(self, index: int) -> Tensor:
        """View [num_blocks, 2, kv_heads, block_size, head_dim] of this stage's layer `index`."""


class Attention:
    """The residual stream [T, hidden] plus attention over it: projections, rotation, KV cache, attention."""

    def __init__(self, reader: WeightReader, shard: Shard, spec: ModelSpec, prefix: str):
        self._ops = shard.ops
        self._head_dim = spec.head_dim
        self._scale = spec.head_dim**-0.5
        heads, kv_heads = shard.heads(spec.num_heads), shard.heads(spec.num_kv_heads)
        self._num_heads, self._num_kv_heads = len(heads), len(kv_heads)
        q = Outputs(f"{prefix}.q_proj", spec.num_heads * spec.head_dim, _dimensions(heads, spec.head_dim))
        k, v = (
            Outputs(f"{prefix}.{name}", spec.num_kv_heads * spec.head_dim, _dimensions(kv_heads, spec.head_dim))
            for name in ("k_proj", "v_proj")
        )
        self.qkv = ColumnParallelLinear(reader, shard, (q, k, v), spec.hidden_size, spec.attention_bias)
        shape = (spec.hidden_size, q.total)
        self.out = RowParallelLinear(reader, shard, f"{prefix}.o_proj", shape, q.rows, spec.attention_bias)

    def __call__(self, hidden: Tensor, norm: Norm, rope: Rope, kv_layer: Tensor, plan: Any) -> Tensor:
        qkv = self.qkv(hidden, norm).view(len(hidden), -1, self._head_dim)
        q, k, v = torch.split(qkv, [self._num_heads, self._num_kv_heads, self._num_kv_heads], dim=1)
        q = self._ops.rope_store(q, k, v, kv_layer, plan, rope)
        attended = self._ops.paged_attention(q, kv_layer, plan, self._scale)
        return self.out(attended.view(len(hidden), -1), hidden)


class GatedMLP:
    """The residual stream [T, hidden] plus down(silu(gate(x)) * up(x))."""

    def __init__(self, reader: WeightReader, shard: Shard, spec: ModelSpec, prefix: str):
        size = spec.intermediate_size
        part = shard.part(size)
        gate, up = (Outputs(f"{prefix}.{name}", size, part) for name in ("gate_proj", "up_proj"))
        self.gate_up = ColumnParallelLinear(reader, shard, (gate, up), spec.hidden_size, spec.mlp_bias, "silu_mul")
        shape = (spec.hidden_size, size)
        self.down = RowParallelLinear(reader, shard, f"{prefix}.down_proj", shape, part, spec.mlp_bias)

    def __call__(self, hidden: Tensor, norm: Norm) -> Tensor:
        return self.down(self.gate_up(hidden, norm), hidden)


class DecoderLayer:
    """The residual stream [T, hidden] through attention and MLP, each behind its norm."""

    def __init__(self, reader: WeightReader, shard: Shard, spec: ModelSpec, index: int):
        prefix = layer_prefix(index)
        self._attention_norm = read_norm(reader, f"{prefix}input_layernorm", spec.hidden_size, spec.norm_eps)
        self._attention = Attention(reader, shard, spec, f"{prefix}self_attn")
        self._mlp_norm = read_norm(reader, f"{prefix}post_attention_layernorm", spec.hidden_size, spec.norm_eps)
        self._mlp = GatedMLP(reader, shard, spec, f"{prefix}mlp")

    def __call__(self, hidden: Tensor, rope: Rope, kv_layer: Tensor, plan: Any) -> Tensor:
        hidden = self._attention(hidden, self._attention_norm, rope, kv_layer, plan)
        return self._mlp(hidden, self._mlp_norm)

    @property
    def weights(self) -> LayerWeights:
        """All that this layer computes with, for operations on whole layers."""
        return LayerWeights(
            self._attention_norm,
            self._attention.qkv.weight,
            self._attention.out.weight,
            self._mlp_norm,
            self._mlp.gate_up.weight,
            self._mlp.down.weight,
        )


@dataclass(frozen=True, slots=True)
class Head:
    """What follows the layers on the last stage: x [R, hidden] -> logits [R, vocab]."""

    norm: Norm
    vocabulary: VocabHead

    def __call__(self, x: Tensor) -> Tensor:
        return self.vocabulary(x, self.norm)


class Model:
    """One rank's part of a decoder: its stage's layers, cut for its tp_rank. `load_model` makes it."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        shard: Shard,
        rope: Rope,
        layers: Sequence[DecoderLayer],
        embedding: VocabEmbedding | None,
        head: Head | None,
    ):
        self.spec = spec
        self.dtype = dtype
        self.hidden_size = spec.hidden_size
        self._shard = shard
        self._rope = rope
        self._layers = layers
        self._stack = stack_layers(spec, shard, rope, layers)
        self._embedding = embedding
        self._head = head

    @torch.inference_mode()
    def forward(self, batch: ModelBatch, kv: LayeredCache, hidden: Tensor | None = None) -> Tensor:
        """Compute a batch's stage. The first stage takes no `hidden`, the others the stage before's [T, hidden].

        Returns hidden [T, hidden], or on the last stage the logits of batch.sample_rows: [R, vocab] float32.
        """
        if self._embedding is not None:
            hidden = self._embedding(batch.token_ids)
        assert hidden is not None, "a stage after the first computes on the hidden states of the one before"
        plan = self._shard.ops.plan_attention(batch, kv.layer(0))
        for part in self._parts(len(hidden)):
            hidden = self._compute(hidden, kv, plan, part)
            self._shard.comm.progress()
        if self._head is None:
            return hidden
        rows = batch.sample_rows  # ascending
        return self._head(hidden if len(rows) == len(hidden) else hidden.index_select(0, rows))

    def _parts(self, num_tokens: int) -> Iterator[range]:
        """The layers, cut where a few tokens' time has passed: so often the ranks' messages want to be moved."""
        size = 1 if self._stack is None else max(1, _TOKENS_AT_ONCE // num_tokens)
        for start in range(0, len(self._layers), size):
            yield range(start, min(start + size, len(self._layers)))

    def _compute(self, hidden: Tensor, kv: LayeredCache, plan: Any, part: range) -> Tensor:
        if self._stack is not None:
            return self._stack(hidden, kv.layers, plan, part)
        for index in part:
            hidden = self._layers[index](hidden, self._rope, kv.layer(index), plan)
        return hidden


def stack_layers(spec: ModelSpec, shard: Shard, rope: Rope, layers: Sequence[DecoderLayer]) -> LayerStack | None:
    """A stage's layers as one operation, where there is one and, for several ranks, memory that they share."""
    shared = shard.comm.shared
    if shard.size > 1 and shared is None:
        return None
    heads, kv_heads = shard.heads(spec.num_heads), shard.heads(spec.num_kv_heads)
    shape = LayerShape(len(heads), len(kv_heads), spec.head_dim, spec.head_dim**-0.5)
    return shard.ops.stack_layers([layer.weights for layer in layers], shape, rope, shared)


def layer_prefix(index: int) -> str:
    """What the names of a layer's tensors begin with."""
    return f"model.layers.{index}."


def _dimensions(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
