"""Where the time of an iteration goes: `python benchmarks/iteration.py --sequences 64`.

Runs scheduler and worker in this process and prints milliseconds of each phase. On one thread they are CPU time, which
hardly changes when others use the machine; with --threads it is wall time, for a quiet one. Needs the repository on
PYTHONPATH (. and kernels).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from fastserve_hpc.boot.heap import keep_freed_memory
from fastserve_hpc.config import EngineConfig
from fastserve_hpc.core.kv_manager import KvManager
from fastserve_hpc.core.plan import IterationPlan
from fastserve_hpc.core.policy.fcfs import Fcfs
from fastserve_hpc.core.request import Request, SamplingParams
from fastserve_hpc.core.scheduler import Scheduler
from fastserve_hpc.models.decoder import Model
from fastserve_hpc.models.loader import load_model
from fastserve_hpc.models.locate import locate
from fastserve_hpc.models.spec import load_spec
from fastserve_hpc.ops import find_kernels, for_device
from fastserve_hpc.parallel.single import SingleComm
from fastserve_hpc.parallel.topology import Topology
from fastserve_hpc.worker.kv_cache import KVCache, KVShape, KVSize
from fastserve_hpc.worker.memory_watch import watch_host
from fastserve_hpc.worker.worker import Worker

NUM_BLOCKS = 4096
PHASES = {
    "schedule": ("scheduler", "schedule"),
    "batch to tensors": ("worker._builder", "build"),
    "forward": ("worker._model", "forward"),
    "  embedding": ("worker._model", "_entrance"),
    "  layers": ("worker._model", "_stack"),
    "  head": ("worker._model._head.vocabulary", "_own_logits"),
    "  most likely": ("worker._model._head.vocabulary._shard.ops", "most_likely"),
    "clear blocks": ("worker._kv", "clear"),
    "sample": ("worker._outputs", "read"),
    "report": ("worker", "report"),
    "execute, all": ("worker", "execute"),
    "update": ("scheduler", "update"),
}
"""Owner and name of what is timed."""


class Clock:
    """Seconds by phase; `now` is the clock that tells them."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)

    def timed(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            start = self._now()
            result = call(*args)
            self.seconds[phase] += self._now() - start
            return result

        return run


class Engine:
    """Scheduler and worker of one rank."""

    def __init__(self, model_name: str, max_batch: int, num_threads: int):
        torch.set_num_threads(num_threads)
        config = EngineConfig(model=model_name)
        files = locate(model_name)
        spec = load_spec(files.path)
        chosen = for_device(torch.device("cpu"), "auto", find_kernels(config.block_size, spec.head_dim, num_threads))
        print(chosen.description)
        model: Model = load_model(files, spec, Topology(), SingleComm(), chosen.dtype, ops=chosen.ops)
        keep_freed_memory()
        shape = KVShape.of(spec, Topology(), config.block_size, chosen.dtype)
        limits = {"max_tokens": config.max_batch_tokens, "max_seqs": max_batch, "max_model_len": spec.max_position}
        cache = KVCache(shape, KVSize(NUM_BLOCKS, 0), torch.device("cpu"))
        self.worker = Worker(model, cache, Topology(), SingleComm(), watch_host(), **limits)
        self.scheduler = Scheduler(
            Fcfs(),
            KvManager(NUM_BLOCKS, config.block_size),
            max_batch=max_batch,
            max_batch_tokens=config.max_batch_tokens,
            num_stages=1,
        )
        self.clock = Clock(time.thread_time if num_threads == 1 else time.perf_counter)
        for phase, (owner, name) in PHASES.items():
            target: Any = self
            for part in owner.split("."):
                target = getattr(target, part)
            if getattr(target, name) is not None:
                setattr(target, name, self.clock.timed(phase, getattr(target, name)))

    def turn(self) -> IterationPlan:
        plan = self.scheduler.schedule(0.0)
        assert plan is not None
        result = self.worker.execute(plan).result
        assert result is not None
        self.scheduler.update(result, 0.0)
        return plan


def show(kind: str, count: int, seconds: dict[str, float]) -> None:
    print(f"\n{kind}: {count} iterations, ms each")
    for phase in PHASES:
        print(f"  {phase:<18}{seconds[phase] / count * 1e3:9.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    engine = Engine(options.model, options.sequences, options.threads)
    for number in range(1, options.sequences + 1):
        prompt = tuple((number * 977 + i * 131) % 40000 + 500 for i in range(options.prompt))
        sampling = SamplingParams(max_tokens=options.output, temperature=options.temperature, seed=number)
        engine.scheduler.add(Request(number, prompt, sampling), 0.0)
    totals: dict[str, tuple[int, dict[str, float]]] = {}
    while not engine.scheduler.is_idle:
        engine.clock.seconds = dict.fromkeys(PHASES, 0.0)
        plan = engine.turn()
        kind = "decode" if all(piece.num_tokens == 1 for piece in plan.slices) else "prefill"
        count, seconds = totals.get(kind, (0, dict.fromkeys(PHASES, 0.0)))
        totals[kind] = (count + 1, {phase: seconds[phase] + engine.clock.seconds[phase] for phase in PHASES})
    for kind, (count, seconds) in totals.items():
        show(kind, count, seconds)


if __name__ == "__main__":
    main()
