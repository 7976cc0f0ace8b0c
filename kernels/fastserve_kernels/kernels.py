"""The kernels as functions of torch tensors. All on the CPU; rows may be strided, the last dimension is contiguous."""

from __future__ import annotations

from fastserve_kernels.attention import AttentionKernels
from fastserve_kernels.decoder import DecoderKernels
from fastserve_kernels.linear import LinearKernels
from fastserve_kernels.rows import RowKernels
from fastserve_kernels.shared import SharedKernels


class Kernels(LinearKernels, AttentionKernels, RowKernels, SharedKernels, DecoderKernels):
    """Every operation of one instruction set."""
