"""The decoder that all families share: one rank's part of it, from token ids or hidden states to the next stage's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fastserve_hpc.models.layers import Linear, RMSNorm, RowParallelLinear, Shard, VocabEmbedding, VocabHead
from fastserve_hpc.models.rope import RopeTable
from fastserve_hpc.models.spec import ModelSpec
from fastserve_hpc.models.weights import WeightReader
from fastserve_hpc.ops import AttentionBatch
from fastserve_hpc.parallel.comm import TensorComm


class ModelBatch(AttentionBatch, Protocol):
    """What a model reads of `worker.batch.Batch`: T tokens, of which R rows need logits."""

    @property
    def token_ids(self) -> Tensor:
        """[T] int64."""

    @property
    def positions(self) -> Tensor:
        """[T] int64."""

    @property
    def sample_rows(self) -> Tensor:
        """[R] int64."""


class LayeredCache(Protocol):
    """What a model needs of `worker.kv_cache.KVCache`."""

    def layer(self, index: int) -> Tensor:
        """View [num_blocks, 2, kv_heads, block_size, head_dim] of this stage's layer `index`."""


class Attention:
    """x [T, hidden] -> [T, hidden]: projections, rotation, the KV cache, attention."""

    def __init__(self, reader: WeightReader, shard: Shard, spec: ModelSpec, prefix: str):
        self._ops = shard.ops
        self._head_dim = spec.head_dim
        self._scale = spec.head_dim**-0.5
        heads, kv_heads = shard.heads(spec.num_heads), shard.heads(spec.num_kv_heads)
        self._num_heads, self._num_kv_heads = len(heads), len(kv_heads)
        rows, kv_rows = _widen(heads, spec.head_dim), _widen(kv_heads, spec.head_dim)
        size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        outputs = [
            (f"{prefix}.q_proj", size, rows),
            (f"{prefix}.k_proj", kv_size, kv_rows),
            (f"{prefix}.v_proj", kv_size, kv_rows),
        ]
        self._qkv = Linear.columns(reader, shard, outputs, spec.hidden_size, spec.attention_bias)
        self._out = RowParallelLinear(
            reader, shard, f"{prefix}.o_proj", (spec.hidden_size, size), rows, spec.attention_bias
        )

    def __call__(self, x: Tensor, rope: tuple[Tensor, Tensor], kv_layer: Tensor, plan: Any) -> Tensor:
        qkv = self._qkv(x).view(len(x), -1, self._head_dim)
        rotated = self._num_heads + self._num_kv_heads
        qk = self._ops.rope(qkv[:, :rotated], *rope)
        q, k, v = qk[:, : self._num_heads], qk[:, self._num_heads :], qkv[:, rotated:]
        self._ops.store_kv(k, v, kv_layer, plan)
        return self._out(self._ops.paged_attention(q, kv_layer, plan, self._scale).view(len(x), -1))


class GatedMLP:
    """x [T, hidden] -> [T, hidden]: down(silu(gate(x)) * up(x))."""

    def __init__(self, reader: WeightReader, shard: Shard, spec: ModelSpec, prefix: str):
        self._ops = shard.ops
        size = spec.intermediate_size
        part = shard.part(size)
        outputs = [(f"{prefix}.gate_proj", size, part), (f"{prefix}.up_proj", size, part)]
        self._gate_up = Linear.columns(reader, shard, outputs, spec.hidden_size, spec.mlp_bias)
        self._down = RowParallelLinear(
            reader, shard, f"{prefix}.down_proj", (spec.hidden_size, size), part, spec.mlp_bias
        )

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._ops.silu_mul(self._gate_up(x)))


class DecoderLayer:
    """The residual stream [T, hidden] through attention and MLP, each behind its norm."""

    def __init__(self, reader: WeightReader, shard: Shard, spec: ModelSpec, index: int):
        prefix = layer_prefix(index)
        self._attention_norm = RMSNorm(reader, shard, f"{prefix}input_layernorm", spec.hidden_size, spec.norm_eps)
        self._attention = Attention(reader, shard, spec, f"{prefix}self_attn")
        self._mlp_norm = RMSNorm(reader, shard, f"{prefix}post_attention_layernorm", spec.hidden_size, spec.norm_eps)
        self._mlp = GatedMLP(reader, shard, spec, f"{prefix}mlp")

    def __call__(self, hidden: Tensor, rope: tuple[Tensor, Tensor], kv_layer: Tensor, plan: Any) -> Tensor:
        attended = self._attention(self._attention_norm(hidden), rope, kv_layer, plan)
        hidden, normed = self._mlp_norm.add(attended, hidden)
        return hidden + self._mlp(normed)


class Model:
    """One rank's part of a decoder: its stage's layers, cut for its tp_rank; `load_model` makes it."""

    def __init__(
        self,
        spec: ModelSpec,
        shard: Shard,
        comm: TensorComm,
        rope: RopeTable,
        layers: Sequence[DecoderLayer],
        embedding: VocabEmbedding | None,
        norm: RMSNorm | None,
        head: VocabHead | None,
    ):
        self.spec = spec
        self._ops = shard.ops
        self._comm = comm
        self._rope = rope
        self._layers = layers
        self._embedding = embedding
        self._norm = norm
        self._head = head

    @torch.inference_mode()
    def forward(self, batch: ModelBatch, kv: LayeredCache, hidden: Tensor | None = None) -> Tensor:
        """Compute a batch's stage. The first stage takes no `hidden`, the others the stage before's [T, hidden].

        Returns hidden [T, hidden], or on the last stage the logits of batch.sample_rows: [R, vocab] float32,
        complete on tp_rank 0.
        """
        if self._embedding is not None:
            hidden = self._embedding(batch.token_ids)
        assert hidden is not None, "a stage after the first computes on the hidden states of the one before"
        rope = self._rope(batch.positions)
        plan = self._ops.plan_attention(batch, kv.layer(0))
        for index, layer in enumerate(self._layers):
            hidden = layer(hidden, rope, kv.layer(index), plan)
            self._comm.progress()
        if self._norm is None or self._head is None:
            return hidden
        return self._head(self._norm(hidden.index_select(0, batch.sample_rows)))


def layer_prefix(index: int) -> str:
    """What the names of a layer's tensors begin with."""
    return f"model.layers.{index}."


def _widen(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
