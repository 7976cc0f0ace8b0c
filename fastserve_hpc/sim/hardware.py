"""What hardware makes of a model: the cost of an iteration, and room for KV."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from fastserve_hpc.core.cost import Costs
from fastserve_hpc.errors import ConfigError
from fastserve_hpc.sim.copies import Link
from fastserve_hpc.sim.shapes import WEIGHT_BYTES, ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device and its links: peak numbers of the data sheets, and which part of them is reached."""

    name: str
    flops: float
    """Dense fp16 operations a second."""
    memory_bandwidth: float
    memory_bytes: float
    pcie_to_host: float = 24e9
    pcie_to_device: float = 24e9
    copy_launch_s: float = 10e-6
    """Of every copy between host and device, beside its bytes."""
    host_memory_bytes: float = 200e9
    """A device's share of what its host has for KV."""
    link_bandwidth: float = 250e9
    """Between the ranks of one stage, bytes a second each way."""
    link_latency_s: float = 12e-6
    """Of one all-reduce between the ranks of a stage."""
    stage_bandwidth: float = 20e9
    stage_latency_s: float = 40e-6
    overhead_s: float = 1.5e-3
    """Of an iteration outside the device: scheduling, launches, sampling; a stage each."""
    compute_efficiency: float = 0.55
    bandwidth_efficiency: float = 0.85
    decode_overlap: float = 0.5
    """The part of a decode's compute that hides behind the reading of weights."""
    usable_memory: float = 0.92

    def costs(self, shape: ModelShape, tp: int = 1, pp: int = 1) -> Costs:
        """The time from an iteration's start to its samples, through all stages."""
        flops = self.flops * self.compute_efficiency * tp
        bandwidth = self.memory_bandwidth * self.bandwidth_efficiency * tp
        token_s = 2 * shape.num_parameters / flops + self._all_reduce_token_s(shape, tp)
        token_s += (pp - 1) * shape.hidden_size * WEIGHT_BYTES / self.stage_bandwidth
        waits = 2 * shape.num_layers * self.link_latency_s * (tp > 1) + (pp - 1) * self.stage_latency_s
        return Costs(
            fixed_s=shape.weight_bytes / bandwidth + pp * self.overhead_s + waits,
            prefill_token_s=token_s,
            prefill_attention_s=4 * shape.num_layers * shape.num_heads * shape.head_dim / flops,
            decode_sequence_s=token_s * (1 - self.decode_overlap),
            kv_token_s=shape.kv_bytes_per_token / bandwidth,
        )

    def _all_reduce_token_s(self, shape: ModelShape, tp: int) -> float:
        """Two ring all-reduces a layer."""
        moved = 2 * shape.num_layers * shape.hidden_size * WEIGHT_BYTES * 2 * (tp - 1) / tp
        return moved / self.link_bandwidth

    def link(self, shape: ModelShape, num_ranks: int, block_size: int, is_coalesced: bool = True) -> Link:
        """Between the tiers of a rank, which has its part of every block."""
        return Link(
            block_bytes=shape.kv_bytes_per_token * block_size / num_ranks,
            to_host=self.pcie_to_host,
            to_device=self.pcie_to_device,
            launch_s=self.copy_launch_s,
            is_coalesced=is_coalesced,
        )

    def host_kv_tokens(self, shape: ModelShape, num_ranks: int) -> int:
        """Positions whose KV the hosts hold."""
        return int(self.host_memory_bytes * num_ranks / shape.kv_bytes_per_token)

    def kv_tokens(self, shape: ModelShape, tp: int = 1, pp: int = 1) -> int:
        """Positions whose KV fits beside the weights. Raises `ConfigError` with the numbers if none does."""
        ranks = tp * pp
        free = ranks * self.memory_bytes * self.usable_memory - shape.weight_bytes
        tokens = int(free / shape.kv_bytes_per_token)
        if tokens < 1:
            raise ConfigError(
                f"{shape.name} has {shape.weight_bytes / 1e9:.0f} GB of weights, but {ranks} x {self.name} hold "
                f"{ranks * self.memory_bytes * self.usable_memory / 1e9:.0f} GB: use a larger --tp or --pp"
            )
        return tokens


HARDWARE: Mapping[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        Hardware(name="a100-40g", flops=312e12, memory_bandwidth=1.555e12, memory_bytes=40e9),
        Hardware(name="a100-80g", flops=312e12, memory_bandwidth=2.039e12, memory_bytes=80e9),
        Hardware(
            name="h100",
            flops=989e12,
            memory_bandwidth=3.35e12,
            memory_bytes=80e9,
            pcie_to_host=50e9,
            pcie_to_device=50e9,
            link_bandwidth=380e9,
        ),
        Hardware(
            name="h200",
            flops=989e12,
            memory_bandwidth=4.8e12,
            memory_bytes=141e9,
            pcie_to_host=50e9,
            pcie_to_device=50e9,
            link_bandwidth=380e9,
        ),
        Hardware(
            name="cpu",
            flops=450e9,
            compute_efficiency=1.0,
            memory_bandwidth=30e9,
            bandwidth_efficiency=1.0,
            memory_bytes=16e9,
            decode_overlap=0.2,
            pcie_to_host=10e9,
            pcie_to_device=10e9,
            host_memory_bytes=16e9,
            link_bandwidth=5e9,
            link_latency_s=30e-6,
            stage_bandwidth=5e9,
            stage_latency_s=100e-6,
            overhead_s=1e-3,
        ),
    )
}


def as_measured(
    known: Hardware, costs: Costs, weight_bytes: float, num_parameters: float, kv_bytes_per_token: float
) -> Hardware:
    """`known` with the speeds that explain what the iterations of one model took on one rank."""
    read_s = max(costs.fixed_s - known.overhead_s, costs.fixed_s / 2)
    bandwidth = weight_bytes / read_s
    if costs.kv_token_s > 0:  # of small models the weights stay in caches, the KV does not
        bandwidth = min(bandwidth, kv_bytes_per_token / costs.kv_token_s)
    return replace(
        known,
        flops=2 * num_parameters / costs.prefill_token_s,
        compute_efficiency=1.0,
        memory_bandwidth=bandwidth,
        bandwidth_efficiency=1.0,
        decode_overlap=1 - costs.decode_sequence_s / costs.prefill_token_s,
        overhead_s=max(0.0, costs.fixed_s - weight_bytes / bandwidth),
    )


def find_hardware(name: str) -> Hardware:
    """Known hardware, or that of a JSON file with the fields of `Hardware`. Raises `ConfigError`."""
    if name in HARDWARE:
        return HARDWARE[name]
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"--hardware {name}: use {', '.join(HARDWARE)} or a JSON file")
    try:
        values = json.loads(path.read_bytes())
        numbers = {field.name: float(values[field.name]) for field in fields(Hardware)[1:] if field.name in values}
        return Hardware(name=path.stem, **numbers)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"--hardware {path}: {error}") from None
