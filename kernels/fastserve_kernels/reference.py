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
