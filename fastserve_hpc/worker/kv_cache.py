"""The KV cache of one rank: blocks on the device and on the host, and the copies between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fastserve_hpc.core.plan import BlockCopy
from fastserve_hpc.errors import ConfigError
from fastserve_hpc.models.spec import ModelSpec
from fastserve_hpc.parallel.topology import Topology
from fastserve_hpc.worker.copies import Copies, StreamCopies, ThreadCopies
from fastserve_hpc.worker.prefault import Prefault

_DEVICE_FRACTION = 0.9
"""Of a GPU's free memory, what its tier takes where nobody said how much."""
_SHARED_FRACTION = 0.5
"""The same where the tiers share one memory, for both together: others live there, too."""
_ALIGNMENT = 2**21
"""A huge page; no vector of a block crosses a cache line."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """One block on one rank: [num_layers, 2, num_kv_heads, block_size, head_dim] of `dtype`."""

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, spec: ModelSpec, topology: Topology, block_size: int, dtype: torch.dtype) -> KVShape:
        """The share of this rank: its stage's layers, its part of the KV heads (at least one)."""
        num_layers = len(topology.layer_range(spec.num_layers))
        num_kv_heads = max(1, spec.num_kv_heads // topology.tp_size)
        return cls(num_layers, num_kv_heads, block_size, spec.head_dim, dtype)

    @property
    def block_bytes(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim * self.dtype.itemsize

    def num_blocks(self, budget_bytes: int) -> int:
        """How many blocks fit into a budget."""
        return budget_bytes // self.block_bytes


@dataclass(frozen=True, slots=True)
class KVSize:
    """Blocks of each tier."""

    device_blocks: int
    host_blocks: int


def choose_size(
    shape: KVShape,
    device_kv: int | None,
    host_kv: int | None,
    free_bytes: int,
    max_batch: int,
    max_model_len: int,
    host_free_bytes: int | None = None,
) -> KVSize:
    """Blocks for budgets in bytes; None: what `max_batch` longest requests need, as far as memory allows.

    `free_bytes` is this rank's share of what its device has free, `host_free_bytes` of what the host has, None
    where they are the same memory. Raises `ConfigError` where the device has not room for a single block.
    """
    budget = _device_budget(host_kv, free_bytes, host_free_bytes) if device_kv is None else device_kv
    device = shape.num_blocks(budget)
    if device < 1:
        given = f"{free_bytes} bytes free" if device_kv is None else f"--device-kv {device_kv} bytes"
        raise ConfigError(
            f"{given}: no room for one KV block of {shape.block_bytes} bytes on this rank: "
            "give more memory or lower --block-size"
        )
    if device_kv is None:
        device = min(device, max_batch * -(-max_model_len // shape.block_size))
    if host_kv is not None:
        return KVSize(device, shape.num_blocks(host_kv))
    return KVSize(device, device if host_free_bytes is None else min(device, shape.num_blocks(host_free_bytes // 2)))


def _device_budget(host_kv: int | None, free_bytes: int, host_free_bytes: int | None) -> int:
    """What the device tier may take of the free memory; activations and others need some, too."""
    if host_free_bytes is not None:
        return int(free_bytes * _DEVICE_FRACTION)
    both = int(free_bytes * _SHARED_FRACTION)
    return both // 2 if host_kv is None else max(0, both - host_kv)


class KVCache:
    """Two tiers of blocks, [num_blocks, layers, 2, kv_heads, block_size, head_dim] each, zeroed.

    Block-major: a block is one contiguous piece, so that it moves between the tiers as one copy.
    """

    def __init__(self, shape: KVShape, size: KVSize, device: torch.device):
        self.shape = shape
        self.device_tier = _zeros(shape, size.device_blocks, device)
        self.host_tier = _zeros(shape, size.host_blocks, torch.device("cpu"), pinned=device.type == "cuda")
        make_copies = StreamCopies if device.type == "cuda" else ThreadCopies
        self._copies: Copies = make_copies(self.device_tier, self.host_tier)
        self._last_started = 0
        self._prefault = Prefault(self.device_tier) if device.type == "cpu" else None

    @property
    def layers(self) -> torch.Tensor:
        """The device blocks of all this stage's layers."""
        return self.device_tier

    def layer(self, index: int) -> torch.Tensor:
        """The device blocks of this stage's layer `index`: a view [num_blocks, 2, kv_heads, block_size, head_dim]."""
        return self.device_tier[:, index]

    def note_use(self, slot: int) -> None:
        """Device blocks up to `slot` may be in use from now on: the memory of those behind it is made ready."""
        if self._prefault is not None:
            self._prefault.note_use((slot + 1) * self.shape.block_bytes)

    def clear(self, slots: Sequence[int]) -> None:
        """Zero whole blocks of the device tier."""
        for slot in slots:
            self.device_tier[slot].zero_()

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Begin copies; they run beside what is computed from now on.

        Raises `ValueError` unless the copies' numbers go on without a gap.
        """
        if not copies:
            return
        for copy in copies:
            if copy.copy_id != self._last_started + 1:
                raise ValueError(f"copy {copy.copy_id} follows {self._last_started}: a copy is missing or came twice")
            self._last_started = copy.copy_id
        self._copies.start(copies)

    def wait_for(self, copy_id: int) -> float:
        """What is computed from now on finds the uploads up to this number done; seconds that this rank stood."""
        return self._copies.wait(copy_id) if copy_id else 0.0

    def copies_done(self) -> int:
        """The highest n such that copies 1..n are done. Never waits."""
        return self._copies.done()


def _zeros(shape: KVShape, num_blocks: int, device: torch.device, pinned: bool = False) -> torch.Tensor:
    # Zeros, since attention weights of 0 are multiplied with whatever lies behind a sequence's end.
    sizes = (num_blocks, shape.num_layers, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
    if device.type != "cpu" or pinned:
        return torch.zeros(sizes, dtype=shape.dtype, device=device, pin_memory=pinned)
    # numpy's zeros are untouched pages of the kernel's: a large cache takes no memory before it is used.
    num_bytes = math.prod(sizes) * shape.dtype.itemsize
    raw = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return torch.from_numpy(raw[start : start + num_bytes]).view(shape.dtype).view(sizes)
