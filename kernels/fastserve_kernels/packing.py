"""Packed weights and the memory they live in."""

from __future__ import annotations

import mmap
import threading
from dataclasses import dataclass

import torch
from torch import Tensor

PANEL = 32
STEP = 32
HUGE_PAGE = 2 << 20
CHUNK = 64 << 20


def round_up(value: int, step: int) -> int:
    return (value + step - 1) // step * step


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight [num_outputs, num_inputs] in the kernels' layout (cpu/abi.h); `gated`: gate and up interleaved."""

    data: Tensor
    bias: Tensor | None  # float32, in packed order, padded
    num_outputs: int
    num_inputs: int
    gated: bool

    @property
    def nbytes(self) -> int:
        return self.data.numel() * 2


class WeightArena:
    """Hands out parts of large mappings in 2 MB pages: a decode reads every weight, and with 4 KB pages the
    translation of addresses costs a tenth of the bandwidth. A mapping lives as long as a tensor in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk: Tensor | None = None
        self._used = 0

    def take(self, num_elements: int) -> Tensor:
        """A bf16 vector of zeros, aligned to 64 bytes."""
        nbytes = round_up(num_elements * 2, 64)
        with self._lock:
            if self._chunk is None or self._used + nbytes > self._chunk.numel():
                self._chunk = _map_huge(max(CHUNK, nbytes))
                self._used = 0
            part = self._chunk[self._used : self._used + nbytes]
            self._used += nbytes
        return part.view(torch.bfloat16)[:num_elements]


def _map_huge(nbytes: int) -> Tensor:
    size = round_up(nbytes, HUGE_PAGE)
    mapping = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE
    return whole[start : start + size]


def packed_bias(bias: Tensor | None, up_bias: Tensor | None, gated: bool) -> Tensor | None:
    """float32 [padded outputs] in the order of the packed outputs."""
    if bias is None and up_bias is None:
        return None
    width = PANEL // 2 if gated else PANEL
    halves = [_padded(part, width) for part in ((bias, up_bias) if gated else (bias,)) if part is not None]
    if len(halves) != (2 if gated else 1):
        raise ValueError("a gated weight takes the biases of both halves or of none")
    return torch.stack(halves, dim=1).reshape(-1).contiguous()


def _padded(bias: Tensor, width: int) -> Tensor:
    rows = bias.new_zeros(round_up(bias.numel(), width), dtype=torch.float32)
    rows[: bias.numel()] = bias
    return rows.view(-1, width)
