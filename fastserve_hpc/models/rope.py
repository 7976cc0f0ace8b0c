"""Rotary position embedding: the angles of every position, as a table of cosines and sines."""

from __future__ import annotations

from math import pi

import torch
from torch import Tensor

from fastserve_hpc.models.spec import RopeSpec


class RopeTable:
    """cos, sin [max_position, head_dim / 2] in float32.

    A table, so that a position's values have the same bits in every batch; positions are multiplied in
    float32, as the models were trained.
    """

    def __init__(self, rope: RopeSpec, head_dim: int, max_position: int, factors: Tensor | None, device: torch.device):
        frequencies = inverse_frequencies(rope, head_dim)
        if factors is not None:
            frequencies = frequencies / factors
        angles = torch.outer(torch.arange(max_position, dtype=torch.float32), frequencies)
        self._cos = angles.cos().to(device)
        self._sin = angles.sin().to(device)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) [T, head_dim / 2] of positions [T]."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Radians per position of each pair of dimensions, [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.scaling == "linear":
        return frequencies / rope.factor
    if rope.scaling == "llama3":
        return _llama3(rope, frequencies)
    return frequencies


def _llama3(rope: RopeSpec, frequencies: Tensor) -> Tensor:
    """Slow rotations, which never came round in training, are stretched; fast ones kept; those between blended."""
    turns = rope.original_max_position * frequencies / (2 * pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / rope.factor
