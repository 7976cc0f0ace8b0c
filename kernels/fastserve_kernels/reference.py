"""The same operations in torch, in float32 inside: the oracles of the kernels' tests."""

from __future__ import annotations

import torch
from torch import Tensor

from fastserve_kernels.abi import Activation
from fastserve_kernels.packing import PANEL, STEP, round_up


def pack(weight: Tensor, up: Tensor | None = None) -> Tensor:
    """[n, k] -> flat [panels, kp / 2, 32, 2], zero where there is nothing to pack."""
    width = PANEL if up is None else PANEL // 2
    parts = [weight] if up is None else [weight, up]
    n, k = weight.shape
    padded = weight.new_zeros(len(parts), round_up(n, width), round_up(k, STEP))
    for part, source in zip(padded, parts, strict=True):
        part[:n, :k] = source
    panels = padded.view(len(parts), -1, width, padded.shape[-1] // 2, 2)
    return panels.permute(1, 3, 0, 2, 4).reshape(-1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension."""
    values = x.float()
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (values * scale * weight.float()).to(x.dtype)


def activate(y: Tensor, activation: Activation, up: Tensor | None = None) -> Tensor:
    if activation == Activation.RELU:
        return torch.relu(y)
    if activation == Activation.SILU_MUL and up is not None:
        return torch.nn.functional.silu(y) * up
    if activation == Activation.GELU_TANH_MUL and up is not None:
        return torch.nn.functional.gelu(y, approximate="tanh") * up
    return y


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """float32 [rows, n]."""
    return torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())


def pack_kv(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Plain blocks [..., block_size, head_dim] -> the layout of the kernels' pages (cpu/abi.h), same shape."""
    *outer, block_size, head_dim = k.shape
    packed_k = k.reshape(*outer, block_size // 16, 16, head_dim // 2, 2).transpose(-2, -3)
    packed_v = v.reshape(*outer, block_size // 2, 2, head_dim).transpose(-1, -2)
    return packed_k.reshape(k.shape), packed_v.reshape(v.shape)


def unpack_kv(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of pack_kv."""
    *outer, block_size, head_dim = k.shape
    plain_k = k.reshape(*outer, block_size // 16, head_dim // 2, 16, 2).transpose(-2, -3)
    plain_v = v.reshape(*outer, block_size // 2, head_dim, 2).transpose(-1, -2)
    return plain_k.reshape(k.shape), plain_v.reshape(v.shape)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [tokens, heads, head_dim], cos and sin [tokens, head_dim / 2]; float32 out."""
    a, b = x.float().chunk(2, dim=-1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat([a * c - b * s, b * c + a * s], dim=-1)


def attention(
    q: Tensor, k: Tensor, v: Tensor, start: int, scale: float, window: int = 0, softcap: float = 0.0
) -> Tensor:
    """q [queries, heads, head_dim] at positions from `start` on, k and v [keys, kv_heads, head_dim]; float32 out."""
    group = q.shape[1] // k.shape[1]
    keys, values = (part.float().repeat_interleave(group, dim=1) for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    query, key = torch.arange(start, start + len(q))[:, None], torch.arange(len(k))[None]
    hidden = (key > query) | ((key <= query - window) if window > 0 else False)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)
