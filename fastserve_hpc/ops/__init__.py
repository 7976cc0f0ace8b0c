"""Operations of the models. `for_device` picks the implementation; nobody else asks for the device."""

from __future__ import annotations

from fastserve_hpc.ops.choice import Chosen, find_kernels, for_device
from fastserve_hpc.ops.interface import (
    Activation,
    AttentionBatch,
    LayerShape,
    LayerStack,
    LayerWeights,
    Norm,
    Ops,
    Rope,
    WeightRows,
)

__all__ = [
    "Activation",
    "AttentionBatch",
    "Chosen",
    "LayerShape",
    "LayerStack",
    "LayerWeights",
    "Norm",
    "Ops",
    "Rope",
    "WeightRows",
    "find_kernels",
    "for_device",
]
