"""The operations that models are made of: what every implementation offers, and what they read of a batch.

An implementation is a module with these functions; `ops.for_device` picks one, once per model.
The torch one, `ops.reference`, says exactly what each computes and is the oracle of the others.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class AttentionBatch(Protocol):
    """What attention reads of an iteration's batch: S sequence slices with T tokens in all."""

    @property
    def num_tokens(self) -> int: ...
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
    """One function per operation. Inputs are not changed unless said; results have the dtype of `x`.

    A KV layer is the view [num_blocks, 2, kv_heads, block_size, head_dim] of a block-major cache. What
    lies inside a page belongs to the implementation; every number in it must be finite, written or not.
    """

    def pack_linear(self, weight: Tensor) -> Any:
        """The form of a weight [out, in] that `linear` wants; may be the tensor itself."""

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        """x [T, in] times the transposed weight, plus the bias [out]: [T, out]."""

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Rows `ids` [T] of weight [vocab, hidden]: [T, hidden]."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., H] over its root mean square, times weight [H]; computed in float32."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(sum, normed): sum = residual + x, rounded to its dtype, and `rms_norm` of that."""

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [T, heads, head_dim] rotated by the angles of cos, sin [T, head_dim / 2] (float32).

        Dimension i is paired with i + head_dim / 2, as Hugging Face checkpoints have it.
        """

    def silu_mul(self, x: Tensor) -> Tensor:
        """silu(left half) * right half of x [T, 2 * I]: [T, I]."""

    def plan_attention(self, batch: AttentionBatch, kv_layer: Tensor) -> Any:
        """All of an iteration's attention that is the same for every layer; once per forward."""

    def store_kv(self, k: Tensor, v: Tensor, kv_layer: Tensor, plan: Any) -> None:
        """Write k, v [T, kv_heads, head_dim] to the batch's slots of a KV layer, in place."""

    def paged_attention(self, q: Tensor, kv_layer: Tensor, plan: Any, scale: float) -> Tensor:
        """Causal attention of q [T, heads, head_dim] over each slice's blocks, its own tokens included.

        Heads are divided evenly over the KV heads, in order.
        """
