"""Attention over the paged KV cache in plain torch.

The pages of several decodes are gathered into one padded tensor and attended at once; a slice with more
tokens is attended on its own. What to gather is the same for every layer, so it is planned once per forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fastserve_hpc.ops.interface import AttentionBatch

GATHER_BYTES = 4 * 2**20
"""Most bytes gathered at once: stays in the caches, and below what malloc hands back to the system each time."""


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Slices of one token, padded to the longest."""

    query_rows: Tensor  # [S]
    pages: Tensor  # [2 * S * kv_heads * num_blocks], rows of the flat cache
    mask: Tensor  # [S, 1, 1, num_blocks * block_size], 0 or -inf


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One slice of several tokens."""

    query_rows: slice
    pages: Tensor  # [2 * kv_heads * num_blocks], rows of the flat cache
    mask: Tensor  # [num_tokens, keys], 0 or -inf


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Where this iteration's tokens stand, where their K and V go, and which pages each slice attends."""

    batch: AttentionBatch
    query_lens: list[int]
    seq_lens: list[int]
    store_blocks: Tensor  # [T]
    store_offsets: Tensor  # [T]
    slices: dict[int, tuple[list[_Decodes], list[_Chunk]]]
    """By window; filled as layers ask."""

    @property
    def positions(self) -> Tensor:
        """[T]."""
        return self.batch.positions


def plan_attention(batch: AttentionBatch, kv_layer: Tensor) -> AttentionPlan:
    block_size = kv_layer.shape[3]
    return AttentionPlan(
        batch,
        query_lens=batch.query_lens.tolist(),
        seq_lens=batch.seq_lens.tolist(),
        store_blocks=batch.slot_ids // block_size,
        store_offsets=batch.slot_ids % block_size,
        slices={},
    )


def store_kv(k: Tensor, v: Tensor, kv_layer: Tensor, plan: AttentionPlan) -> None:
    """Write k, v [T, kv_heads, head_dim] to the batch's slots, in place."""
    kv_layer[plan.store_blocks, 0, :, plan.store_offsets] = k
    kv_layer[plan.store_blocks, 1, :, plan.store_offsets] = v


def paged_attention(
    q: Tensor, kv_layer: Tensor, plan: AttentionPlan, scale: float, window: int = 0, softcap: float = 0.0
) -> Tensor:
    if window not in plan.slices:
        plan.slices[window] = plan_slices(plan, kv_layer, window)
    decodes, chunks = plan.slices[window]
    flat = _flat(kv_layer)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for group in decodes:
        out[group.query_rows] = _attend_decodes(q[group.query_rows], flat, kv_layer, group, (scale, softcap))
    for chunk in chunks:
        out[chunk.query_rows] = _attend_chunk(q[chunk.query_rows], flat, kv_layer, chunk, (scale, softcap))
    return out


def _attend_decodes(q: Tensor, flat: Tensor, kv_layer: Tensor, group: _Decodes, score: tuple[float, float]) -> Tensor:
    """A decode sees every key, so the query heads of one KV head can stand as its query positions."""
    _, _, kv_heads, _, head_dim = kv_layer.shape
    k, v = flat.index_select(0, group.pages).view(2, len(q), kv_heads, -1, head_dim)
    grouped = q.reshape(len(q), kv_heads, -1, head_dim)
    return _attend(grouped, k, v, group.mask, *score).reshape(q.shape)


def _attend_chunk(q: Tensor, flat: Tensor, kv_layer: Tensor, chunk: _Chunk, score: tuple[float, float]) -> Tensor:
    """KV heads stand as the batch, so that K and V need no copy per query head."""
    _, _, kv_heads, _, head_dim = kv_layer.shape
    num_tokens, num_keys = chunk.mask.shape
    pages = flat.index_select(0, chunk.pages).view(2, kv_heads, 1, -1, head_dim)[:, :, :, :num_keys]
    grouped = q.transpose(0, 1).reshape(kv_heads, -1, num_tokens, head_dim)
    k, v = pages.expand(-1, -1, grouped.shape[1], -1, -1)
    out = _attend(grouped, k, v, chunk.mask, *score)
    return out.reshape(-1, num_tokens, head_dim).transpose(0, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    if not softcap:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    scores = softcap * torch.tanh(q @ k.transpose(-1, -2) * (scale / softcap)) + mask
    return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v


def _flat(kv_layer: Tensor) -> Tensor:
    """The layer as rows of one page of one head each: [rows, block_size * head_dim].

    Pages of other layers lie between; a page's row is block * (rows per block) + (K or V) * kv_heads + head.
    """
    num_blocks, _, kv_heads, block_size, head_dim = kv_layer.shape
    width = block_size * head_dim
    rows = (num_blocks - 1) * (kv_layer.stride(0) // width) + 2 * kv_heads
    return kv_layer.as_strided((rows, width), (width, 1))


def _page_rows(kv_layer: Tensor, blocks: Tensor) -> Tensor:
    """Rows of `_flat`, K of all before V of all: blocks [S, n] -> [2 * S * kv_heads * n]."""
    _, _, kv_heads, block_size, head_dim = kv_layer.shape
    rows_per_block = kv_layer.stride(0) // (block_size * head_dim)
    inside = torch.arange(2 * kv_heads, device=blocks.device).view(2, 1, kv_heads, 1)
    return (blocks.long()[:, None, :] * rows_per_block + inside).flatten()


def plan_slices(plan: AttentionPlan, kv_layer: Tensor, window: int) -> tuple[list[_Decodes], list[_Chunk]]:
    """Blocks that lie before what any token of a slice sees are not gathered."""
    block_size = kv_layer.shape[3]
    first_blocks = [
        max(0, seq_len - query_len - window + 1) // block_size if window else 0
        for query_len, seq_len in zip(plan.query_lens, plan.seq_lens, strict=True)
    ]
    spans = [seq_len - first * block_size for seq_len, first in zip(plan.seq_lens, first_blocks, strict=True)]
    decodes = [i for i, n in enumerate(plan.query_lens) if n == 1]
    chunks = [i for i, n in enumerate(plan.query_lens) if n > 1]
    return (
        [_plan_decodes(plan, kv_layer, g, first_blocks, spans, window) for g in _groups(decodes, spans, kv_layer)],
        [_plan_chunk(plan, kv_layer, i, first_blocks[i], window) for i in chunks],
    )


def _groups(decodes: list[int], spans: list[int], kv_layer: Tensor) -> Iterator[list[int]]:
    """Decodes with similarly many keys, most first, as many as may be gathered at once."""
    _, _, kv_heads, _, head_dim = kv_layer.shape
    position_bytes = 2 * kv_heads * head_dim * kv_layer.element_size()
    group: list[int] = []
    for i in sorted(decodes, key=lambda i: -spans[i]):
        longest = spans[group[0]] if group else 0
        if group and ((len(group) + 1) * longest * position_bytes > GATHER_BYTES or 2 * spans[i] < longest):
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def _plan_decodes(
    plan: AttentionPlan, kv_layer: Tensor, group: list[int], first_blocks: list[int], spans: list[int], window: int
) -> _Decodes:
    device, block_size = kv_layer.device, kv_layer.shape[3]
    members = torch.tensor(group, device=device)
    num_blocks = -(-spans[group[0]] // block_size)
    columns = torch.tensor([first_blocks[i] for i in group], device=device)[:, None]
    columns = columns + torch.arange(num_blocks, device=device)
    positions = (columns[:, :, None] * block_size + torch.arange(block_size, device=device)).flatten(1)
    tables = plan.batch.block_tables[members]
    ends = plan.batch.seq_lens[members, None]
    # Padded with the sequence's own last block: another's need not be numbers, and 0 times NaN is NaN.
    columns = torch.minimum(columns, (ends.long() - 1) // block_size)
    return _Decodes(
        query_rows=plan.batch.query_start[members].long(),
        pages=_page_rows(kv_layer, tables.gather(1, columns)),
        mask=_additive(_visible(positions, ends - 1, window), kv_layer.dtype)[:, None, None],
    )


def _plan_chunk(plan: AttentionPlan, kv_layer: Tensor, index: int, first_block: int, window: int) -> _Chunk:
    num_tokens, seq_len, block_size = plan.query_lens[index], plan.seq_lens[index], kv_layer.shape[3]
    first_row = sum(plan.query_lens[:index])
    keys = torch.arange(first_block * block_size, seq_len, device=kv_layer.device)
    blocks = slice(first_block, -(-seq_len // block_size))
    return _Chunk(
        query_rows=slice(first_row, first_row + num_tokens),
        pages=_page_rows(kv_layer, plan.batch.block_tables[index : index + 1, blocks]),
        mask=_additive(_visible(keys, keys[-num_tokens:, None], window), kv_layer.dtype),
    )


def _visible(keys: Tensor, queries: Tensor, window: int) -> Tensor:
    """Which positions each query's sees."""
    visible = keys <= queries
    return visible & (keys > queries - window) if window else visible


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))
