"""Rotary position embedding: the angles of every position, as a table of cosines and sines."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log, pi

import torch
from torch import Tensor

from fastserve_hpc.models.spec import ModelSpec, RopeSpec
from fastserve_hpc.ops import Rope


@dataclass(frozen=True, slots=True)
class Ropes:
    """A model's rotations: of all layers, or of those that see all and of those with a window. None: it has none."""

    full: Rope | None
    local: Rope | None

    @classmethod
    def make(cls, spec: ModelSpec, max_len: int, factors: Tensor | None, device: torch.device) -> Ropes:
        """The tables of `rope_table` for `max_len` positions; `factors` are of the layers that see all."""
        full, local = (
            None if rope is None else rope_table(rope, spec.head_dim, max_len, divisors, device)
            for rope, divisors in ((spec.rope, factors), (spec.local_rope, None))
        )
        return cls(full, local)

    def of(self, spec: ModelSpec, layer: int) -> Rope | None:
        return self.local if self.local is not None and spec.window(layer) else self.full


def rope_table(spec: RopeSpec, head_dim: int, max_position: int, factors: Tensor | None, device: torch.device) -> Rope:
    """The rotation of positions 0..max_position-1; `factors` [head_dim / 2], where given, divide the frequencies.

    A table, so that a position's values have the same bits in every batch; positions are multiplied in
    float32, as the models were trained.
    """
    frequencies = inverse_frequencies(spec, head_dim)
    if factors is not None:
        frequencies = frequencies / factors
    angles = torch.outer(torch.arange(max_position, dtype=torch.float32), frequencies)
    cos, sin = (part * spec.attention_factor for part in (angles.cos(), angles.sin()))
    return Rope(cos.to(device), sin.to(device))


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """Radians per position of each pair of dimensions, [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / spec.theta**exponents
    if spec.scaling == "linear":
        return frequencies / spec.factor
    if spec.scaling == "llama3":
        return _llama3(spec, frequencies)
    if spec.scaling == "yarn":
        return _yarn(spec, frequencies, head_dim)
    return frequencies


def _llama3(spec: RopeSpec, frequencies: Tensor) -> Tensor:
    """Slow rotations, which never came round in training, are stretched; fast ones kept; those between blended."""
    turns = spec.original_max_position * frequencies / (2 * pi)
    kept = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    kept = kept.clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / spec.factor


def _yarn(spec: RopeSpec, frequencies: Tensor, head_dim: int) -> Tensor:
    """As llama3, but the blend is linear in the dimension, between those of two given numbers of turns."""
    first, last = (_dimension_turning(spec, turns, head_dim) for turns in (spec.beta_fast, spec.beta_slow))
    if spec.truncate:
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    return stretched * frequencies / spec.factor + (1 - stretched) * frequencies


def _dimension_turning(spec: RopeSpec, turns: float, head_dim: int) -> float:
    """Which pair of dimensions comes round so often within the positions of the training."""
    return head_dim * log(spec.original_max_position / (turns * 2 * pi)) / (2 * log(spec.theta))
