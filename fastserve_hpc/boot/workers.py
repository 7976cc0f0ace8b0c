"""Makes this rank's worker: the model's part, its KV cache, its links; or the fake one."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fastserve_hpc.boot.models import ServedModel, Weights
from fastserve_hpc.boot.world import World
from fastserve_hpc.config import EngineConfig
from fastserve_hpc.core.plan import IterationPlan, RankReport
from fastserve_hpc.errors import ConfigError
from fastserve_hpc.parallel.comm import TensorComm
from fastserve_hpc.parallel.single import SingleComm
from fastserve_hpc.worker.fake import FakeWorker

if TYPE_CHECKING:
    import torch
    from fastserve_kernels.kernels import Kernels

    from fastserve_hpc.worker.kv_cache import KVShape, KVSize

FAKE_BLOCKS = 65536
_SPIN_COUNT = "10000"
"""Bounds how long idle OpenMP threads spin: with the default, a busy neighbour costs 8 ms per parallel region."""


class RankWorker(Protocol):
    def execute(self, plan: IterationPlan) -> RankReport: ...

    def report(self) -> RankReport: ...


@dataclass(frozen=True, slots=True)
class BuiltWorker:
    """A rank's worker and what the coordinator must know of all of them."""

    worker: RankWorker
    num_blocks: int
    """KV blocks that every rank has on its device."""
    max_model_len: int
    comm: TensorComm


def build_worker(config: EngineConfig, model: ServedModel, world: World) -> BuiltWorker:
    """Collective: every rank builds its own. Raises what is wrong with model, memory or settings."""
    if model.weights is None:
        return _fake(config, model, world)
    return _real(config, model, model.weights, world)


def _fake(config: EngineConfig, model: ServedModel, world: World) -> BuiltWorker:
    rank, has_result = world.topology.rank, world.topology.reports_results
    worker = FakeWorker(config.block_size, FAKE_BLOCKS, rank=rank, has_result=has_result)
    return BuiltWorker(worker, FAKE_BLOCKS, model.limits.max_model_len, SingleComm())


def _real(config: EngineConfig, model: ServedModel, weights: Weights, world: World) -> BuiltWorker:
    os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)  # read when torch loads libgomp
    import torch

    from fastserve_hpc.models.loader import load_model
    from fastserve_hpc.ops import for_device
    from fastserve_hpc.worker.kv_cache import KVCache, KVShape
    from fastserve_hpc.worker.memory_watch import watch_cuda, watch_host
    from fastserve_hpc.worker.worker import Worker

    local_rank, ranks_here = world.place_on_node()
    device = _choose_device(local_rank)
    num_threads = world.cores()
    torch.set_num_threads(num_threads)
    chosen = for_device(device, config.dtype, _find_kernels(config, weights, num_threads, world))
    dtype = chosen.dtype
    world.say(f"computing with {chosen.description}")
    began = time.perf_counter()
    comm = world.comm(config.max_batch_tokens * weights.spec.hidden_size * dtype.itemsize, device, chosen.kernels)
    stage = load_model(weights.files, weights.spec, world.topology, comm, dtype, device, chosen.ops)
    if chosen.kernels is not None:
        torch.set_num_threads(1)  # what is left to torch is small, and its threads would take the kernels' cores
    world.say(f"loaded {model.name} in {time.perf_counter() - began:.1f} s")
    shape = KVShape.of(weights.spec, world.topology, config.block_size, dtype)
    memory = watch_host() if device.type == "cpu" else watch_cuda(device.index)
    size = _agree_on_size(
        config, shape, memory.free_bytes() // (ranks_here if device.type == "cpu" else 1), model, world
    )
    max_model_len = limit_length(config, size.device_blocks, model, world)
    worker = Worker(
        stage,
        KVCache(shape, size, device),
        world.topology,
        comm,
        memory,
        max_tokens=config.max_batch_tokens,
        max_seqs=config.max_batch,
        max_model_len=max_model_len,
    )
    return BuiltWorker(worker, size.device_blocks, max_model_len, comm)


def _find_kernels(config: EngineConfig, weights: Weights, num_threads: int, world: World) -> Kernels | str:
    """The C++ kernels or why there are none. Ranks must compute alike: where one has none, no rank has."""
    from fastserve_hpc.ops import find_kernels

    found = find_kernels(config.block_size, weights.spec.head_dim, num_threads)
    (all_have,) = world.minimum(int(not isinstance(found, str)))
    return found if all_have or isinstance(found, str) else "another rank has no C++ kernels"


def _choose_device(local_rank: int) -> torch.device:
    """This rank's GPU where there are GPUs; a launcher that binds GPUs shows each rank its own."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _agree_on_size(config: EngineConfig, shape: KVShape, free_bytes: int, model: ServedModel, world: World) -> KVSize:
    """The KV blocks that every rank can have: the coordinator knows one number for all."""
    from fastserve_hpc.worker.kv_cache import KVSize, choose_size

    own = choose_size(shape, config.device_kv, config.host_kv, free_bytes, config.max_batch, model.limits.max_model_len)
    device_blocks, host_blocks = world.minimum(own.device_blocks, own.host_blocks)
    return KVSize(device_blocks, host_blocks)


def limit_length(config: EngineConfig, num_blocks: int, model: ServedModel, world: World) -> int:
    """The longest request that the KV cache can hold; a limit that the user asked for is not cut silently."""
    capacity, limit = num_blocks * config.block_size, model.limits.max_model_len
    if capacity >= limit:
        return limit
    room = f"the KV cache of the smallest rank holds {num_blocks} blocks, {capacity} tokens"
    if config.max_model_len is not None:
        raise ConfigError(f"--max-model-len {limit}, but {room}: lower it to {capacity} or give more --device-kv")
    world.say(f"{room}: requests are limited to that, not to the model's {limit}; more --device-kv raises it")
    return capacity
