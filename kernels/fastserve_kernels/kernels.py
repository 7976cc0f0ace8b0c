"""The kernels as functions of torch tensors. All on the CPU; rows may be strided, the last dimension is contiguous."""

from __future__ import annotations

import ctypes
import weakref

import torch
from torch import Tensor

from fastserve_kernels.abi import Activation, AttentionArgs, KvView, LinearArgs, PackArgs, RopeStoreArgs
from fastserve_kernels.library import Library
from fastserve_kernels.packing import PANEL, PackedLinear, WeightArena, packed_bias, round_up

PAGE_TOKENS = 16
MAX_HEAD_DIM = 512
GATED = (Activation.SILU_MUL, Activation.GELU_TANH_MUL)


class Kernels:
    """One instruction set and one pool of threads. Calls from several threads run one after another."""

    def __init__(self, library: Library, num_threads: int) -> None:
        self.isa = library.isa
        self.dot_order = library.dot_order
        """Kernels with the same order of summation give the same bits."""
        self.num_threads = num_threads
        self._library = library
        self._pool = library.handle.fs_pool_create(num_threads)
        self._arena = WeightArena()
        self._linear = library.operations["linear"]
        self._attention = library.operations["attention"]
        self._rope_store = library.operations["rope_store"]
        weakref.finalize(self, library.handle.fs_pool_destroy, self._pool)

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None = None, *, up: Tensor | None = None, up_bias: Tensor | None = None
    ) -> PackedLinear:
        """Copies bf16 `weight` [n, k] into the kernels' layout; with `up` [n, k] the two halves of a gated MLP."""
        for part in (weight, up):
            _check(part is None or (part.dtype == torch.bfloat16 and part.stride(-1) == 1), "weights must be bf16 rows")
        _check(up is None or up.shape == weight.shape, "gate and up must have one shape")
        n, k = weight.shape
        per_panel = PANEL if up is None else PANEL // 2
        data = self._arena.take(round_up(n, per_panel) // per_panel * PANEL * round_up(k, PANEL))
        args = PackArgs(
            weight=weight.data_ptr(),
            up=_pointer(up),
            packed=data.data_ptr(),
            ld_weight=weight.stride(0),
            ld_up=0 if up is None else up.stride(0),
            n=n,
            k=k,
        )
        self._library.handle.fs_pack(self._pool, ctypes.byref(args))
        return PackedLinear(data, packed_bias(bias, up_bias, up is not None), n, k, up is not None)

    def linear(
        self,
        x: Tensor,
        weight: PackedLinear,
        *,
        norm_weight: Tensor | None = None,
        eps: float = 0.0,
        activation: Activation = Activation.NONE,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
    ) -> Tensor:
        """activation(rms_norm(x) W^T + bias) + residual: bf16 `x` [rows, k] -> `out` [rows, n], bf16 or float32.

        `norm_weight` (float32 [k]) switches the norm on. `residual` (bf16 [rows, n]) may be `out`. A row's result does
        not depend on the other rows, on their number or on the number of threads.
        """
        rows = x.shape[0]
        if out is None:
            out = x.new_empty(rows, weight.num_outputs, dtype=out_dtype)
        _check(x.dtype == torch.bfloat16 and x.shape[1] == weight.num_inputs, "x must be bf16 [rows, num_inputs]")
        _check((activation in GATED) == weight.gated, "a gated activation needs a weight packed with up, and only it")
        _check(out.shape == (rows, weight.num_outputs), "out must be [rows, num_outputs]")
        _check(x.stride(1) == 1 and out.stride(1) == 1, "the last dimension must be contiguous")
        args = LinearArgs(
            x=x.data_ptr(),
            weight=weight.data.data_ptr(),
            bias=_pointer(weight.bias),
            norm_weight=_pointer(norm_weight),
            residual=_pointer(residual),
            out=out.data_ptr(),
            ld_x=x.stride(0),
            ld_residual=0 if residual is None else residual.stride(0),
            ld_out=out.stride(0),
            rows=rows,
            k=weight.num_inputs,
            n=weight.num_outputs,
            eps=eps,
            activation=activation,
            out_is_float=out.dtype == torch.float32,
        )
        self._linear(self._pool, args)
        return out

    def supports_cache(self, block_size: int, head_dim: int) -> bool:
        """Whether attention and rope_store take such blocks."""
        return block_size % PAGE_TOKENS == 0 and head_dim % 16 == 0 and head_dim <= MAX_HEAD_DIM

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
        view = self._view(kv)
        out = torch.empty_like(q) if out is None else out
        for tensor in (block_tables, query_start, seq_lens):
            _check(tensor.dtype == torch.int32 and tensor.stride(-1) == 1, "tables and lengths must be int32 rows")
        _check(q.dtype == out.dtype == torch.bfloat16 and q.shape == out.shape, "q and out must be bf16 of one shape")
        _check(q.stride(1) == 1 and out.stride(1) == 1, "the last dimension must be contiguous")
        num_heads = q.shape[1] // view.head_dim
        _check(num_heads % view.num_kv_heads == 0, "the query heads must be a multiple of the KV heads")
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
        self._attention(self._pool, args)
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
        view = self._view(kv)
        for part in (q, k, v):
            _check(part.dtype == torch.bfloat16 and part.stride(1) == 1, "q, k and v must be bf16 rows")
        _check(k.shape[1] == v.shape[1] == view.num_kv_heads * view.head_dim, "k and v must have the cache's heads")
        _check(positions.dtype == slots.dtype == torch.int64, "positions and slots must be int64")
        args = RopeStoreArgs(
            kv=view,
            q=q.data_ptr(),
            k=k.data_ptr(),
            v=v.data_ptr(),
            cos=_pointer(cos),
            sin=_pointer(sin),
            q_norm=_pointer(q_norm),
            k_norm=_pointer(k_norm),
            positions=positions.data_ptr(),
            slots=slots.data_ptr(),
            ld_q=q.stride(0),
            ld_k=k.stride(0),
            ld_v=v.stride(0),
            num_tokens=q.shape[0],
            num_heads=q.shape[1] // view.head_dim,
            norm_eps=norm_eps,
        )
        self._rope_store(self._pool, args)

    def _view(self, kv: Tensor) -> KvView:
        _, two, num_kv_heads, block_size, head_dim = kv.shape
        _check(
            kv.dtype == torch.bfloat16 and two == 2,
            "the cache must be bf16 [blocks, 2, kv_heads, block_size, head_dim]",
        )
        _check(self.supports_cache(block_size, head_dim), "block_size and head_dim must be multiples of 16")
        _check(kv.stride(4) == 1 and kv.stride(3) == head_dim, "a block of one head must be contiguous")
        return KvView(kv.data_ptr(), kv.stride(0), kv.stride(1), kv.stride(2), block_size, num_kv_heads, head_dim)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
