"""Makes this rank's worker: the model's part, its KV cache, its links; or the fake one."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fastserve_hpc.boot.heap import keep_freed_memory
from fastserve_hpc.boot.models import ServedModel, Weights
from fastserve_hpc.boot.world import NodePlace, World
from fastserve_hpc.config import EngineConfig
from fastserve_hpc.core.kv_policy import CopyCosts
from fastserve_hpc.core.plan import IterationPlan, RankReport
from fastserve_hpc.errors import ConfigError
from fastserve_hpc.parallel.comm import TensorComm
from fastserve_hpc.parallel.hosts import CoreShare
from fastserve_hpc.parallel.single import SingleComm
from fastserve_hpc.worker.fake import FakeWorker

if TYPE_CHECKING:
    import torch
    from fastserve_kernels.kernels import Kernels

    from fastserve_hpc.models.decoder import Model
    from fastserve_hpc.ops import Chosen
    from fastserve_hpc.worker.kv_cache import KVCache, KVShape, KVSize
    from fastserve_hpc.worker.memory_watch import MemoryWatch

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
    num_host_blocks: int
    """Those in host memory."""
    block_bytes: int
    """Of one block, over all ranks."""
    copy_costs: CopyCosts
    """Of the slowest rank."""
    max_model_len: int
    comm: TensorComm
    compute: str = ""
    """What it computes with, in words."""
    number_bytes: int = 2
    """Of a weight and of a number in the KV cache."""


def build_worker(config: EngineConfig, model: ServedModel, world: World) -> BuiltWorker:
    """Collective: every rank builds its own. Raises what is wrong with model, memory or settings."""
    if model.weights is None:
        return _fake(config, model, world)
    return _real(config, model, model.weights, world)


def _fake(config: EngineConfig, model: ServedModel, world: World) -> BuiltWorker:
    rank, has_result = world.topology.rank, world.topology.reports_results
    worker = FakeWorker(config.block_size, FAKE_BLOCKS, rank=rank, has_result=has_result)
    return BuiltWorker(worker, FAKE_BLOCKS, FAKE_BLOCKS, 0, CopyCosts(), model.limits.max_model_len, SingleComm())


@dataclass(frozen=True, slots=True)
class _Place:
    """Where this rank computes, with what, and how it speaks to the others."""

    on_node: NodePlace
    device: torch.device
    chosen: Chosen
    comm: TensorComm


def _real(config: EngineConfig, model: ServedModel, weights: Weights, world: World) -> BuiltWorker:
    os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)  # read when torch loads libgomp

    from fastserve_hpc.worker.kv_cache import KVCache, KVShape

    began = time.perf_counter()
    place = _take_place(config, weights, world)
    stage = _load_stage(model, weights, place, world, began)
    shape = KVShape.of(weights.spec, world.topology, config.block_size, place.chosen.dtype)
    memory, size = _divide_memory(config, shape, place.on_node, place.device, model, world)
    max_model_len = limit_length(config, size.device_blocks, model, world)
    kv = KVCache(shape, size, place.device)
    return BuiltWorker(
        _assemble(config, stage, kv, memory, max_model_len, place.comm, world),
        size.device_blocks,
        size.host_blocks,
        world.total(shape.block_bytes),
        _copy_costs(kv, world),
        max_model_len,
        place.comm,
        place.chosen.description,
        place.chosen.dtype.itemsize,
    )


def _take_place(config: EngineConfig, weights: Weights, world: World) -> _Place:
    on_node = world.place_on_node()
    device, chosen = _choose_compute(config, weights, on_node, world)
    link_bytes = config.max_batch_tokens * weights.spec.hidden_size * chosen.dtype.itemsize
    return _Place(on_node, device, chosen, world.comm(link_bytes, device, chosen.kernels))


def _load_stage(model: ServedModel, weights: Weights, place: _Place, world: World, began: float) -> Model:
    """This rank's part of the model. Says how long it took since `began`, on the clock of `perf_counter`."""
    from fastserve_hpc.models.loader import load_model
    from fastserve_hpc.models.reading import Reading

    chosen, max_len = place.chosen, model.limits.max_model_len
    with world.node_file() as board:
        reading = Reading(board, world.say)
        ranks = world.topology, place.comm
        stage = load_model(
            weights.files, weights.spec, *ranks, chosen.dtype, place.device, chosen.ops, reading, max_len
        )
    if place.device.type == "cpu":
        keep_freed_memory()
    speed = reading.progress
    world.say(
        f"loaded {model.name} in {time.perf_counter() - began:.1f} s, rank 0's part of {speed.num_bytes / 1e9:.2f} GB "
        f"at {speed.num_bytes / 1e9 / speed.seconds:.2f} GB/s"
    )
    return stage


def _assemble(
    config: EngineConfig,
    stage: Model,
    kv: KVCache,
    memory: MemoryWatch,
    max_model_len: int,
    comm: TensorComm,
    world: World,
) -> RankWorker:
    from fastserve_hpc.worker.worker import Worker

    return Worker(
        stage,
        kv,
        world.topology,
        comm,
        memory,
        max_tokens=config.max_batch_tokens,
        max_seqs=config.max_batch,
        max_model_len=max_model_len,
    )


def _choose_compute(
    config: EngineConfig, weights: Weights, place: NodePlace, world: World
) -> tuple[torch.device, Chosen]:
    """What this rank computes on and with."""
    import torch

    from fastserve_hpc.ops import for_device

    device = _choose_device(place.local_rank)
    share = world.core_share()
    share.settle()
    torch.set_num_threads(1 if share.gives_way else share.num_threads)  # its operations are small, its barriers dear
    chosen = for_device(device, config.dtype, _find_kernels(config, weights, share, world))
    world.say(f"computing with {chosen.description}")
    return device, chosen


def _find_kernels(config: EngineConfig, weights: Weights, share: CoreShare, world: World) -> Kernels | str:
    """The C++ kernels or why there are none. Ranks must compute alike: where one has none, no rank has."""
    from fastserve_hpc.ops import find_kernels

    found = find_kernels(config.block_size, weights.spec.head_dim, share.num_threads, share.is_crowded)
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


def _divide_memory(
    config: EngineConfig, shape: KVShape, place: NodePlace, device: torch.device, model: ServedModel, world: World
) -> tuple[MemoryWatch, KVSize]:
    """The memory that this rank's KV lives in, and the blocks that every rank can have: the coordinator knows one
    number for all."""
    from fastserve_hpc.worker.kv_cache import KVSize, choose_size
    from fastserve_hpc.worker.memory_watch import watch_cuda, watch_host

    host = watch_host()
    host_share = host.free_bytes() // place.num_ranks
    on_gpu = device.type == "cuda"
    memory = watch_cuda(device.index) if on_gpu else host
    own = choose_size(
        shape,
        config.device_kv,
        config.host_kv,
        memory.free_bytes() if on_gpu else host_share,
        config.max_batch,
        model.limits.max_model_len,
        host_free_bytes=host_share if on_gpu else None,
    )
    return memory, KVSize(*world.minimum(own.device_blocks, own.host_blocks))


def _copy_costs(kv: KVCache, world: World) -> CopyCosts:
    """What a copy of a block takes on the slowest rank."""
    from fastserve_hpc.worker.copies import measure

    nanoseconds = (round(seconds * 1e9) for seconds in measure(kv.device_tier, kv.host_tier))
    to_host, to_device = world.minimum(*(-value for value in nanoseconds))
    return CopyCosts(-to_host * 1e-9, -to_device * 1e-9)


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
