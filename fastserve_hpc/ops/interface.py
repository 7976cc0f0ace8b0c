"""The operations that models are made of: what every implementation offers, and what they read of a batch.

An implementation is a module or object with these functions; `ops.for_device` picks one, once per model.
The torch one, `ops.reference`, says exactly what each computes and is the oracle of the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Activation = Literal["none", "silu_mul", "gelu_tanh_mul", "relu"]
"""What a linear does to its outputs. silu_mul: silu of the first half of them times the second half; gelu_tanh_mul:
likewise with gelu in its form with tanh.
"""


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm with a weight [H] in float32; with a bias [H], a layer norm."""

    weight: Tensor
    eps: float
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Rope:
    """cos, sin [max_position, head_dim / 2] in float32: the rotation of each position's pairs of dimensions."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What all layers have in common: one rank's share of the heads, `scale` and `softcap` of the attention scores, and
    the MLP's activation.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float = 0.0
    activation: Activation = "silu_mul"


class WeightRows(Protocol):
    """A weight [out, in] that is still in its files."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """First row and rows [m, in], which may be gone when the next ones are asked for. Rows that none has are 0."""

    def whole(self) -> Tensor:
        """All of it."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """A decoder layer: norm, attention, norm, gated MLP, each added to the residual stream; linears as `pack_linear`
    gives them. The norms of queries, keys and of what is added, and the window, are those of some families.
    """

    attention_norm: Norm
    qkv: Any
    out: Any
    mlp_norm: Norm
    gate_up: Any
    down: Any
    rope: Rope
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    attention_out_norm: Norm | None = None
    mlp_out_norm: Norm | None = None
    window: int = 0


class LayerStack(Protocol):
    """Layers as one operation."""

    def __call__(self, hidden: Tensor, kv_layers: Tensor, plan: Any, layers: range) -> Tensor:
        """Take hidden [T, hidden_size] through the layers of an ascending range; it may be changed, too.

        `kv_layers` is the whole cache [num_blocks, layers, 2, kv_heads, block_size, head_dim].
        """


class AttentionBatch(Protocol):
    """What attention reads of an iteration's batch: S sequence slices with T tokens in all."""

    @property
    def positions(self) -> Tensor:
        """[T] int64."""

    @property
    def slot_ids(self) -> Tensor:
        """[T] int64: where each token's K and V go, block * block_size + offset."""

    @property
    def query_start(self) -> Tensor:
        """[S + 1] int32: the first row of each slice, then T."""

    @property
    def query_lens(self) -> Tensor:
        """[S] int32: tokens of each slice."""

    @property
    def seq_lens(self) -> Tensor:
        """[S] int32: positions that exist once this iteration's are stored."""

    @property
    def block_tables(self) -> Tensor:
        """[S, max_blocks] int32, padded with 0."""


class Ops(Protocol):
    """One function per operation. Inputs are not changed and results have the dtype of the first, unless said.

    A KV layer is the view [num_blocks, 2, kv_heads, block_size, head_dim] of a block-major cache. What
    lies inside a page belongs to the implementation; in those that a batch attends every number must be finite,
    written or not.
    """

    def pack_linear(
        self, weight: Tensor | WeightRows, bias: Tensor | None = None, activation: Activation = "none"
    ) -> Any:
        """The form of a weight [out, in] and bias [out] that `linear` wants; may hold the tensors themselves."""

    def linear(
        self,
        x: Tensor,
        weight: Any,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """residual + activation(norm(x) W^T + bias): x [T, in] -> [T, out], or half that where the activation gates.

        `residual` has the result's shape; not every implementation takes one behind an activation. Activation and
        bias are those of `pack_linear`.
        """

    def normalize(self, x: Tensor, norm: Norm) -> Tensor:
        """norm(x) of each row of x [T, H]."""

    def embedding(self, ids: Tensor, weight: Any, scale: float = 1.0, first_id: int | None = None) -> Tensor:
        """scale times rows `ids` [T] of a weight [vocab, hidden], a tensor or from `pack_linear`: [T, hidden] in its
        dtype. With `first_id` the rows are those of the ids from it on, and other ids give zeros.
        """

    def most_likely(self, logits: Tensor) -> Tensor:
        """[R] int64: the first place where each row of float32 logits [R, n] is largest; -1 where that is no finite
        number, or one in the row is not a number.
        """

    def plan_attention(self, batch: AttentionBatch, kv_layer: Tensor) -> Any:
        """All of an iteration's attention that is the same for every layer; once per forward."""

    def rope_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_layer: Tensor,
        plan: Any,
        rope: Rope | None,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
    ) -> Tensor:
        """Write rotated k, and v, to the batch's slots of a KV layer; return rotated q, which may be `q` itself.

        q [T, heads, head_dim], k and v [T, kv_heads, head_dim] may be views of one tensor. Dimension i is paired
        with i + head_dim / 2, as Hugging Face checkpoints have it. The norms, of each head, come before the rotation.
        """

    def paged_attention(
        self, q: Tensor, kv_layer: Tensor, plan: Any, scale: float, window: int = 0, softcap: float = 0.0
    ) -> Tensor:
        """Causal attention of q [T, heads, head_dim] over each slice's blocks, its own tokens included.

        Heads are divided evenly over the KV heads, in order. With a `window` above 0, a token sees itself and
        window - 1 before it; with a `softcap` above 0, a score s becomes softcap * tanh(scale * s / softcap). The
        result [T, heads, head_dim] is contiguous.
        """

    def stack_layers(self, layers: Sequence[LayerWeights], shape: LayerShape, shared: Any | None) -> LayerStack | None:
        """The layers as one operation, for fewer calls; None where there is none such.

        `shared` is what joins the ranks that hold the other parts of the layers (`TensorComm.shared`), None where
        there are no others.
        """
