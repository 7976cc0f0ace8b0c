"""The operations in plain torch, for CPU and CUDA. See `interface.Ops` for shapes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastserve_hpc.ops.reference_attention import AttentionPlan, paged_attention, plan_attention, store_kv

__all__ = [
    "AttentionPlan",
    "add_rms_norm",
    "embedding",
    "linear",
    "pack_linear",
    "paged_attention",
    "plan_attention",
    "rms_norm",
    "rope",
    "silu_mul",
    "store_kv",
]


def pack_linear(weight: Tensor) -> Tensor:
    return weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    return F.embedding(ids, weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = residual + x
    return total, rms_norm(total, weight, eps)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


def silu_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
