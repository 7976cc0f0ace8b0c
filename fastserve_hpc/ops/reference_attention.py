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
    mask: Tensor  # [num_tokens, seq_len], 0 or -inf


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Where this iteration's tokens stand, where their K and V go, and which pages each slice attends."""

    positions: Tensor  # [T]
    store_blocks: Tensor  # [T]
    store_offsets: Tensor  # [T]
    decodes: tuple[_Decodes, ...]
    chunks: tuple[_Chunk, ...]


def plan_attention(batch: AttentionBatch, kv_layer: Tensor) -> AttentionPlan:
    block_size = kv_layer.shape[3]
    query_lens, seq_lens = batch.query_lens.tolist(), batch.seq_lens.tolist()
    decodes = [i for i, n in enumerate(query_lens) if n == 1]
    chunks = [i for i, n in enumerate(query_lens) if n > 1]
    return AttentionPlan(
        positions=batch.positions,
        store_blocks=batch.slot_ids // block_size,
        store_offsets=batch.slot_ids % block_size,
        decodes=tuple(
            _plan_decodes(batch, kv_layer, group, seq_lens) for group in _groups(decodes, seq_lens, kv_layer)
        ),
        chunks=tuple(_plan_chunk(batch, kv_layer, i, query_lens, seq_lens) for i in chunks),
    )


def store_kv(k: Tensor, v: Tensor, kv_layer: Tensor, plan: AttentionPlan) -> None:
    """Write k, v [T, kv_heads, head_dim] to the batch's slots, in place."""
    kv_layer[plan.store_blocks, 0, :, plan.store_offsets] = k
    kv_layer[plan.store_blocks, 1, :, plan.store_offsets] = v


def paged_attention(q: Tensor, kv_layer: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    flat = _flat(kv_layer)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for group in plan.decodes:
        out[group.query_rows] = _attend_decodes(q[group.query_rows], flat, kv_layer, group, scale)
    for chunk in plan.chunks:
        out[chunk.query_rows] = _attend_chunk(q[chunk.query_rows], flat, kv_layer, chunk, scale)
    return out


def _attend_decodes(q: Tensor, flat: Tensor, kv_layer: Tensor, group: _Decodes, scale: float) -> Tensor:
    """A decode sees every key, so the query heads of one KV head can stand as its query positions."""
    _, _, kv_heads, _, head_dim = kv_layer.shape
    k, v = flat.index_select(0, group.pages).view(2, len(q), kv_heads, -1, head_dim)
    grouped = q.reshape(len(q), kv_heads, -1, head_dim)
    return F.scaled_dot_product_attention(grouped, k, v, group.mask, scale=scale).reshape(q.shape)


def _attend_chunk(q: Tensor, flat: Tensor, kv_layer: Tensor, chunk: _Chunk, scale: float) -> Tensor:
    """KV heads stand as the batch, so that K and V need no copy per query head."""
    _, _, kv_heads, _, head_dim = kv_layer.shape
    num_tokens, seq_len = chunk.mask.shape
    pages = flat.index_select(0, chunk.pages).view(2, kv_heads, 1, -1, head_dim)[:, :, :, :seq_len]
    grouped = q.transpose(0, 1).reshape(kv_heads, -1, num_tokens, head_dim)
    k, v = pages.expand(-1, -1, grouped.shape[1], -1, -1)
    out = F.scaled_dot_product_attention(grouped, k, v, chunk.mask, scale=scale)
    return out.reshape(-1, num_tokens, head_dim).transpose(0, 1)


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


def _groups(decodes: list[int], seq_lens: list[int], kv_layer: Tensor) -> Iterator[list[int]]:
    """Decodes of similar length, longest first, as many as may be gathered at once."""
    _, _, kv_heads, _, head_dim = kv_layer.shape
    position_bytes = 2 * kv_heads * head_dim * kv_layer.element_size()
    group: list[int] = []
    for i in sorted(decodes, key=lambda i: -seq_lens[i]):
        longest = seq_lens[group[0]] if group else 0
        if group and ((len(group) + 1) * longest * position_bytes > GATHER_BYTES or 2 * seq_lens[i] < longest):
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def _plan_decodes(batch: AttentionBatch, kv_layer: Tensor, group: list[int], seq_lens: list[int]) -> _Decodes:
    device, block_size = kv_layer.device, kv_layer.shape[3]
    members = torch.tensor(group, device=device)
    num_blocks = -(-seq_lens[group[0]] // block_size)
    positions = torch.arange(num_blocks * block_size, device=device)
    visible = positions < batch.seq_lens[members, None]
    return _Decodes(
        query_rows=batch.query_start[members].long(),
        pages=_page_rows(kv_layer, batch.block_tables[members, :num_blocks]),
        mask=_additive(visible, kv_layer.dtype)[:, None, None],
    )


def _plan_chunk(
    batch: AttentionBatch, kv_layer: Tensor, index: int, query_lens: list[int], seq_lens: list[int]
) -> _Chunk:
    num_tokens, seq_len = query_lens[index], seq_lens[index]
    first_row = sum(query_lens[:index])
    keys = torch.arange(seq_len, device=kv_layer.device)
    num_blocks = -(-seq_len // kv_layer.shape[3])
    return _Chunk(
        query_rows=slice(first_row, first_row + num_tokens),
        pages=_page_rows(kv_layer, batch.block_tables[index : index + 1, :num_blocks]),
        mask=_additive(keys <= keys[seq_len - num_tokens :, None], kv_layer.dtype),
    )


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))
