"""Attention over the paged KV cache, and what fills the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from fastserve_kernels.abi import AttentionArgs, KvView, RopeStoreArgs
from fastserve_kernels.base import KernelBase, check, pointer

PAGE_TOKENS = 16
MAX_HEAD_DIM = 512


class AttentionKernels(KernelBase):
    """rope_store writes the cache in the layout that paged_attention reads (cpu/abi.h)."""

    def paged_attention(
        self,
        q: Tensor,
        kv: Tensor,
        block_tables: Tensor,
        query_start: Tensor,
        seq_lens: Tensor,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of bf16 `q` [num_tokens, num_heads * head_dim] over the paged cache -> likewise shaped.

        `kv`: one layer's view [num_blocks, 2, num_kv_heads, block_size, head_dim] as rope_store fills it.
        `block_tables` int32 [S, max_blocks], `query_start` int32 [S + 1], `seq_lens` int32 [S]: the keys of each
        sequence, this call's tokens included. `window` > 0: a token sees itself and window - 1 before it.
        A row's result depends on its position and the cache alone, not on chunks, neighbours or threads.
        """
        view = cache_view(kv)
        out = q.new_empty(q.shape) if out is None else out
        for tensor in (block_tables, query_start, seq_lens):
            check(tensor.dtype == torch.int32 and tensor.stride(-1) == 1, "tables and lengths must be int32 rows")
        check(q.dtype == out.dtype == torch.bfloat16 and q.shape == out.shape, "q and out must be bf16 of one shape")
        check(q.stride(1) == 1 and out.stride(1) == 1, "the last dimension must be contiguous")
        num_heads = q.shape[1] // view.head_dim
        check(num_heads % view.num_kv_heads == 0, "the query heads must be a multiple of the KV heads")
        args = AttentionArgs(
            kv=view,
            q=q.data_ptr(),
            out=out.data_ptr(),
            block_tables=block_tables.data_ptr(),
            query_start=query_start.data_ptr(),
            seq_lens=seq_lens.data_ptr(),
            ld_q=q.stride(0),
            ld_out=out.stride(0),
            ld_tables=block_tables.stride(0),
            num_sequences=seq_lens.shape[0],
            num_heads=num_heads,
            scale=scale,
            softcap=softcap,
            window=window,
        )
        self._run("attention", args)
        return out

    def rope_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: Tensor,
        positions: Tensor,
        slots: Tensor,
        *,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        norm_eps: float = 0.0,
    ) -> None:
        """Rotates `q` in place, writes rotated `k` and `v` into the cache; all bf16 [num_tokens, heads * head_dim].

        `cos`, `sin`: float32 [positions, head_dim / 2], the half-split rotation; None: none. `q_norm`, `k_norm`:
        float32 [head_dim], an RMS norm per head before it. `positions`, `slots`: int64 [num_tokens], slot = block *
        block_size + offset; the tokens of one sequence follow each other.
        """
        view = cache_view(kv)
        for part in (q, k, v):
            check(part.dtype == torch.bfloat16 and part.stride(1) == 1, "q, k and v must be bf16 rows")
        check(k.shape[1] == v.shape[1] == view.num_kv_heads * view.head_dim, "k and v must have the cache's heads")
        check(positions.dtype == slots.dtype == torch.int64, "positions and slots must be int64")
        args = RopeStoreArgs(
            kv=view,
            q=q.data_ptr(),
            k=k.data_ptr(),
            v=v.data_ptr(),
            cos=pointer(cos),
            sin=pointer(sin),
            q_norm=pointer(q_norm),
            k_norm=pointer(k_norm),
            positions=positions.data_ptr(),
            slots=slots.data_ptr(),
            ld_q=q.stride(0),
            ld_k=k.stride(0),
            ld_v=v.stride(0),
            num_tokens=q.shape[0],
            num_heads=q.shape[1] // view.head_dim,
            norm_eps=norm_eps,
        )
        self._run("rope_store", args)


def supports_cache(block_size: int, head_dim: int) -> bool:
    """Whether attention and rope_store take such blocks."""
    return block_size % PAGE_TOKENS == 0 and head_dim % 16 == 0 and head_dim <= MAX_HEAD_DIM


def cache_view(kv: Tensor) -> KvView:
    """One layer's [num_blocks, 2, num_kv_heads, block_size, head_dim] as C sees it. Raises ValueError."""
    _, two, num_kv_heads, block_size, head_dim = kv.shape
    check(kv.dtype == torch.bfloat16 and two == 2, "the cache must be bf16 [blocks, 2, kv_heads, block_size, head_dim]")
    check(supports_cache(block_size, head_dim), "block_size and head_dim must be multiples of 16")
    check(kv.stride(4) == 1 and kv.stride(3) == head_dim, "a block of one head must be contiguous")
    return KvView(kv.data_ptr(), kv.stride(0), kv.stride(1), kv.stride(2), block_size, num_kv_heads, head_dim)
