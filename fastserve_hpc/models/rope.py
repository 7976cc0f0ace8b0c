"""Rotary position embedding: the angles of every position, as a table of cosines and sines."""

from __future__ import annotations

from math import pi

import torch
from torch import Tensor

from fastserve_hpc.models.spec import RopeSpec
from fastserve_hpc.ops import Rope


def rope_table(spec: RopeSpec, head_dim: int, max_position: int, factors: Tensor | None, device: torch.device) -> Rope:
    """The rotation of positions 0..max_position-1; `factors` [head_dim / 2], where given, divide the frequencies.

    A table, so that a position's values have the same bits in every batch; positions are multiplied in
    float32, as the models were trained.
    """
    frequencies = inverse_frequencies(spec, head_dim)
    if factors is not None:
        frequencies = frequencies / factors
    angles = torch.outer(torch.arange(max_position, dtype=torch.float32), frequencies)
    return Rope(angles.cos().to(device), angles.sin().to(device))


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """Radians per position of each pair of dimensions, [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / spec.theta**exponents
    if spec.scaling == "linear":
        return frequencies / spec.factor
    if spec.scaling == "llama3":
        return _llama3(spec, frequencies)
    return frequencies


def _llama3(spec: RopeSpec, frequencies: Tensor) -> Tensor:
    """Slow rotations, which never came round in training, are stretched; fast ones kept; those between blended."""
    turns = spec.original_max_position * frequencies / (2 * pi)
    kept = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    kept = kept.clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / spec.factor
