"""The decoder that all families share: one rank's part of it, from token ids or hidden states to the next stage's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fastserve_hpc.models.families import FAMILIES, TensorNames
from fastserve_hpc.models.layers import (
    ColumnParallelLinear,
    Outputs,
    RowParallelLinear,
    Shard,
    VocabEmbedding,
    VocabHead,
    read_norm,
)
from fastserve_hpc.models.rope import Ropes
from fastserve_hpc.models.spec import ModelSpec
from fastserve_hpc.models.weights import WeightReader
from fastserve_hpc.ops import Activation, AttentionBatch, LayerShape, LayerStack, LayerWeights, Norm, Ops

_TOKENS_AT_ONCE = 1024
"""Layers times tokens between two calls of `comm.progress`: some milliseconds of a small model's time."""


class ModelBatch(AttentionBatch, Protocol):
    """What a model reads of `worker.batch.Batch`: T tokens, of which R rows need logits."""

    @property
    def token_ids(self) -> Tensor:
        """[T] int64."""

    @property
    def sample_rows(self) -> Tensor:
        """[R] int64."""

    @property
    def takes_most_likely(self) -> bool:
        """Whether each of the R rows wants no more than its most likely token."""


class LayeredCache(Protocol):
    """What a model needs of `worker.kv_cache.KVCache`."""

    @property
    def layers(self) -> Tensor:
        """[num_blocks, layers, 2, kv_heads, block_size, head_dim] of this stage's layers."""

    def layer(self, index: int) -> Tensor:
        """View [num_blocks, 2, kv_heads, block_size, head_dim] of this stage's layer `index`."""


@dataclass(frozen=True, slots=True)
class LayerSource:
    """What a rank makes its part of layer `index` from."""

    reader: WeightReader
    shard: Shard
    spec: ModelSpec
    ropes: Ropes
    index: int

    @property
    def names(self) -> TensorNames:
        return FAMILIES[self.spec.architecture].tensors

    def name(self, part: str) -> str:
        return self.names.layer(self.index) + part

    def columns(
        self, parts: Sequence[tuple[str, int, range]], bias: bool, activation: Activation = "none"
    ) -> ColumnParallelLinear:
        """Linears from the hidden size, each with its number of outputs and this rank's, as one."""
        outputs = [Outputs(self.name(part), total, rows) for part, total, rows in parts]
        return ColumnParallelLinear(self.reader, self.shard, outputs, self.spec.hidden_size, bias, activation)

    def rows(self, part: str, total: int, inputs: range, bias: bool, out_norm: Norm | None) -> RowParallelLinear:
        """A linear to the hidden size, of whose `total` inputs this rank has some."""
        shape = (self.spec.hidden_size, total)
        return RowParallelLinear(self.reader, self.shard, self.name(part), shape, inputs, bias, out_norm)

    def norm(self, part: str, size: int | None = None) -> Norm:
        """A norm over the hidden size, where not said otherwise."""
        layer_norm = FAMILIES[self.spec.architecture].layer_norm
        size = size or self.spec.hidden_size
        return read_norm(self.reader, self.name(part), size, self.spec.norm_eps, layer_norm)

    def optional_norm(self, part: str | None, size: int | None = None) -> Norm | None:
        return None if part is None else self.norm(part, size)


class Attention:
    """The residual stream [T, hidden] plus attention over it: projections, rotation, KV cache, attention."""

    def __init__(self, source: LayerSource):
        spec, names, shard = source.spec, source.names, source.shard
        self._ops, self._spec = shard.ops, spec
        self.window, self.rope = spec.window(source.index), source.ropes.of(spec, source.index)
        heads, kv_heads = shard.heads(spec.num_heads), shard.heads(spec.num_kv_heads)
        self._heads = [len(heads), len(kv_heads), len(kv_heads)]
        self.q_norm, self.k_norm = (source.optional_norm(n, spec.head_dim) for n in (names.q_norm, names.k_norm))
        own, shared = (
            (count * spec.head_dim, range(part.start * spec.head_dim, part.stop * spec.head_dim))
            for count, part in ((spec.num_heads, heads), (spec.num_kv_heads, kv_heads))
        )
        parts = ((names.q, *own), (names.k, *shared), (names.v, *shared))
        self.qkv = source.columns(parts, spec.attention_bias)
        out_norm = source.optional_norm(names.attention_out_norm)
        self.out = source.rows(names.out, *own, spec.attention_out_bias, out_norm)

    def __call__(self, hidden: Tensor, norm: Norm | None, kv_layer: Tensor, plan: Any) -> Tensor:
        qkv = self.qkv(hidden, norm).view(len(hidden), -1, self._spec.head_dim)
        q, k, v = torch.split(qkv, self._heads, dim=1)
        q = self._ops.rope_store(q, k, v, kv_layer, plan, self.rope, self.q_norm, self.k_norm)
        attended = self._ops.paged_attention(
            q, kv_layer, plan, self._spec.scale, self.window, self._spec.attention_softcap
        )
        return self.out(attended.view(len(hidden), -1), hidden)


class MLP:
    """The residual stream [T, hidden] plus down(activation(gate(x)) * up(x)), or down(activation(up(x)))."""

    def __init__(self, source: LayerSource):
        spec, names = source.spec, source.names
        size = spec.intermediate_size
        part = source.shard.part(size)
        inner = (names.up,) if names.gate is None else (names.gate, names.up)
        self.up = source.columns([(name, size, part) for name in inner], spec.mlp_bias, spec.activation)
        self.down = source.rows(names.down, size, part, spec.mlp_bias, source.optional_norm(names.mlp_out_norm))

    def __call__(self, hidden: Tensor, norm: Norm | None) -> Tensor:
        return self.down(self.up(hidden, norm), hidden)


class DecoderLayer:
    """The residual stream [T, hidden] through attention and MLP, each behind its norm or, in some models, before it."""

    def __init__(self, source: LayerSource):
        self._ops, self._norm_first = source.shard.ops, source.spec.norm_first
        self._attention_norm, self._mlp_norm = map(source.norm, (source.names.attention_norm, source.names.mlp_norm))
        self._attention, self._mlp = Attention(source), MLP(source)

    def __call__(self, hidden: Tensor, kv_layer: Tensor, plan: Any) -> Tensor:
        if self._norm_first:
            hidden = self._attention(hidden, self._attention_norm, kv_layer, plan)
            return self._mlp(hidden, self._mlp_norm)
        hidden = self._ops.normalize(self._attention(hidden, None, kv_layer, plan), self._attention_norm)
        return self._ops.normalize(self._mlp(hidden, None), self._mlp_norm)

    @property
    def weights(self) -> LayerWeights | None:
        """All that this layer computes with, for operations on whole layers; None where these know no such layer."""
        attention, mlp = self._attention, self._mlp
        if attention.rope is None or self._mlp_norm.bias is not None:
            return None
        return LayerWeights(
            self._attention_norm,
            attention.qkv.weight,
            attention.out.weight,
            self._mlp_norm,
            mlp.up.weight,
            mlp.down.weight,
            attention.rope,
            attention.q_norm,
            attention.k_norm,
            attention.out.out_norm,
            mlp.down.out_norm,
            attention.window,
        )


@dataclass(frozen=True, slots=True)
class Entrance:
    """What comes before the layers on the first stage: a batch's token ids -> [T, hidden]."""

    ops: Ops
    vocabulary: VocabEmbedding
    projection: Any | None
    """A linear from the embedding's size to that of the layers."""
    positions: Tensor | None
    """[max_position, hidden], where positions are learned."""

    def __call__(self, batch: ModelBatch) -> Tensor:
        hidden = self.vocabulary(batch.token_ids)
        if self.projection is not None:
            hidden = self.ops.linear(hidden, self.projection)
        return hidden if self.positions is None else hidden + self.positions[batch.positions]


@dataclass(frozen=True, slots=True)
class Head:
    """What follows the layers on the last stage: x [R, hidden] -> logits [R, vocab]."""

    ops: Ops
    norm: Norm | None
    projection: Any | None
    """A linear to the head's size from that of the layers."""
    vocabulary: VocabHead

    def __call__(self, x: Tensor) -> Tensor:
        """See `VocabHead`."""
        return self.vocabulary(*self._projected(x))

    def most_likely(self, x: Tensor) -> Tensor:
        """See `VocabHead.most_likely`."""
        return self.vocabulary.most_likely(*self._projected(x))

    def _projected(self, x: Tensor) -> tuple[Tensor, Norm | None]:
        """What the vocabulary is multiplied with, and the norm that is still to be taken of it."""
        if self.projection is None:
            return x, self.norm
        return self.ops.linear(x, self.projection, norm=self.norm), None


class Model:
    """One rank's part of a decoder: its stage's layers, cut for its tp_rank. `load_model` makes it."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        shard: Shard,
        layers: Sequence[DecoderLayer],
        entrance: Entrance | None,
        head: Head | None,
    ):
        self.spec = spec
        self.dtype = dtype
        self.hidden_size = spec.hidden_size
        self._shard = shard
        self._layers = layers
        self._stack = stack_layers(spec, shard, layers)
        self._entrance = entrance
        self._head = head

    @torch.inference_mode()
    def forward(self, batch: ModelBatch, kv: LayeredCache, hidden: Tensor | None = None) -> Tensor:
        """Compute a batch's stage. The first stage takes no `hidden`, the others the stage before's [T, hidden].

        Returns hidden [T, hidden], or on the last stage the logits of batch.sample_rows: [R, vocab] float32, whole
        on tp_rank 0 and elsewhere this rank's part of each row; or, where that is all the batch wants, the rows' most
        likely tokens: [R] int64, -1 where the logits are not numbers.
        """
        if self._entrance is not None:
            hidden = self._entrance(batch)
        assert hidden is not None, "a stage after the first computes on the hidden states of the one before"
        plan = self._shard.ops.plan_attention(batch, kv.layer(0))
        for part in self._parts(len(hidden)):
            hidden = self._compute(hidden, kv, plan, part)
            self._shard.comm.progress()
        if self._head is None:
            return hidden
        rows = batch.sample_rows  # ascending
        last = hidden if len(rows) == len(hidden) else hidden.index_select(0, rows)
        return self._head.most_likely(last) if batch.takes_most_likely else self._head(last)

    def _parts(self, num_tokens: int) -> Iterator[range]:
        """The layers, cut where a few tokens' time has passed: so often the ranks' messages want to be moved."""
        size = 1 if self._stack is None else max(1, _TOKENS_AT_ONCE // num_tokens)
        for start in range(0, len(self._layers), size):
            yield range(start, min(start + size, len(self._layers)))

    def _compute(self, hidden: Tensor, kv: LayeredCache, plan: Any, part: range) -> Tensor:
        if self._stack is not None:
            return self._stack(hidden, kv.layers, plan, part)
        for index in part:
            hidden = self._layers[index](hidden, kv.layer(index), plan)
        return hidden


def stack_layers(spec: ModelSpec, shard: Shard, layers: Sequence[DecoderLayer]) -> LayerStack | None:
    """A stage's layers as one operation, where there is one and, for several ranks, memory that they share."""
    shared = shard.comm.shared
    if shard.size > 1 and shared is None:
        return None
    weights = [found for layer in layers if (found := layer.weights) is not None]
    if len(weights) < len(layers):
        return None
    heads, kv_heads = shard.heads(spec.num_heads), shard.heads(spec.num_kv_heads)
    shape = LayerShape(len(heads), len(kv_heads), spec.head_dim, spec.scale, spec.attention_softcap, spec.activation)
    return shard.ops.stack_layers(weights, shape, shared)
