"""The operations in plain torch, for CPU and CUDA. See `interface.Ops` for shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastserve_hpc.ops.interface import (
    Activation,
    LayerShape,
    LayerStack,
    LayerWeights,
    Norm,
    Rope,
    WeightRows,
)
from fastserve_hpc.ops.reference_attention import AttentionPlan, paged_attention, plan_attention, store_kv

__all__ = [
    "AttentionPlan",
    "PackedLinear",
    "embedding",
    "gelu_tanh_mul",
    "linear",
    "most_likely",
    "normalize",
    "pack_linear",
    "paged_attention",
    "plan_attention",
    "rms_norm",
    "rope_store",
    "rotate",
    "silu_mul",
    "stack_layers",
]


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A linear as torch wants it: as it comes."""

    weight: Tensor
    bias: Tensor | None
    activation: Activation


def pack_linear(
    weight: Tensor | WeightRows, bias: Tensor | None = None, activation: Activation = "none"
) -> PackedLinear:
    return PackedLinear(weight if isinstance(weight, Tensor) else weight.whole(), bias, activation)


def linear(
    x: Tensor,
    weight: PackedLinear,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    if norm is not None:
        x = normalize(x, norm)
    out = _ACTIVATIONS[weight.activation](F.linear(x, weight.weight, weight.bias))
    if residual is not None:
        out = residual + out
    return out if out_dtype is None else out.to(out_dtype)


def embedding(ids: Tensor, weight: Tensor | PackedLinear, scale: float = 1.0, first_id: int | None = None) -> Tensor:
    table = weight.weight if isinstance(weight, PackedLinear) else weight
    if first_id is None:
        found = F.embedding(ids, table)
    else:
        local = ids - first_id
        foreign = (local < 0) | (local >= len(table))
        found = F.embedding(local.masked_fill(foreign, 0), table).masked_fill(foreign[:, None], 0)
    return found if scale == 1.0 else found * scale


def most_likely(logits: Tensor) -> Tensor:
    maxima, places = logits.max(dim=-1)  # not a number counts as the largest
    return places.masked_fill_(~maxima.isfinite(), -1)


def stack_layers(
    layers: Sequence[LayerWeights],  # noqa: ARG001
    shape: LayerShape,  # noqa: ARG001
    shared: Any | None,  # noqa: ARG001
) -> LayerStack | None:
    return None


def normalize(x: Tensor, norm: Norm) -> Tensor:
    if norm.bias is None:
        return rms_norm(x, norm)
    return F.layer_norm(x.float(), x.shape[-1:], norm.weight, norm.bias, norm.eps).to(x.dtype)


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """x [..., H] over its root mean square, times the weight; computed in float32."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    return (wide * scale * norm.weight).to(x.dtype)


def rope_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_layer: Tensor,
    plan: AttentionPlan,
    rope: Rope | None,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
) -> Tensor:
    q = q if q_norm is None else rms_norm(q, q_norm)
    k = k if k_norm is None else rms_norm(k, k_norm)
    if rope is None:
        store_kv(k, v, kv_layer, plan)
        return q
    cos, sin = rope.cos[plan.positions], rope.sin[plan.positions]
    store_kv(rotate(k, cos, sin), v, kv_layer, plan)
    return rotate(q, cos, sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, head_dim] turned by the angles of cos, sin [T, head_dim / 2]."""
    left, right = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


def silu_mul(x: Tensor) -> Tensor:
    """silu of the left half of x [..., 2 * I] times the right half."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh_mul(x: Tensor) -> Tensor:
    """gelu (by tanh) of the left half of x [..., 2 * I] times the right half."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


_ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "silu_mul": silu_mul,
    "gelu_tanh_mul": gelu_tanh_mul,
    "relu": F.relu,
}
