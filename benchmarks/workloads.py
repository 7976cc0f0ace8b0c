"""The traffic that scheduling is judged on, and how a policy fares with it. Imported by the benchmarks beside it.

An 8B model (GQA) on one A100-80G, chunks of 2,048 tokens, memory for all KV. Load 1 is what fcfs gets done with a queue
that is never empty. Latencies are seconds per output token from arrival to end.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean

from fastserve_hpc.core.cost import CostModel, Costs
from fastserve_hpc.core.policy import make_policy
from fastserve_hpc.core.policy.base import Policy
from fastserve_hpc.core.policy.sizing import SkipJoinRules
from fastserve_hpc.core.policy.skip_join import SkipJoin
from fastserve_hpc.sim.engine import EngineSettings, Finished, SimulatedEngine
from fastserve_hpc.sim.hardware import HARDWARE
from fastserve_hpc.sim.lengths import SHAREGPT
from fastserve_hpc.sim.shapes import SHAPES
from fastserve_hpc.sim.study import Study
from fastserve_hpc.sim.workload import Arrival, DrawnSource, Hints, Source, TraceSource, read_trace
from fastserve_hpc.stats import summarise

AMPLE = 16_000_000
"""Tokens of KV: memory for all."""
WORKLOADS = ("azure", "sharegpt8k", "sharegpt", "mooncake")
TITLES: Mapping[str, str] = {
    "azure": "Azure conversation",
    "sharegpt8k": "ShareGPT-8k",
    "sharegpt": "ShareGPT, first turn",
    "mooncake": "Mooncake, prompts / 8",
}
_FILES = {
    "azure": ("azure_llm_2023_conv.jsonl", 1.0),
    "sharegpt8k": ("batch_sharegpt8k_lengths.jsonl", 1.0),
    "mooncake": ("mooncake_conversation.jsonl", 1 / 8),
}


def add_options(parser: argparse.ArgumentParser, seeds: int) -> None:
    """The options that the benchmarks share."""
    parser.add_argument("--traces", type=Path, default=Path("../shared/traces"), help="where the traces are")
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--requests", type=int, default=1200)


def source_of(workload: str, traces: Path) -> Source:
    if workload == "sharegpt":
        return DrawnSource(SHAREGPT)
    name, scale = _FILES[workload]
    return TraceSource(read_trace(traces / name, scale))


def costs_of(hardware: str = "a100-80g", model: str = "llama-3-8b") -> Costs:
    return HARDWARE[hardware].costs(SHAPES[model])


@dataclass(frozen=True)
class Latency:
    """Of one run."""

    mean: float
    p99: float


@dataclass
class Site:
    """A workload on the machine at a batch limit."""

    source: Source
    max_batch: int
    requests: int
    costs: Costs

    def __post_init__(self) -> None:
        self.settings = EngineSettings(
            costs=self.costs, kv_tokens=AMPLE, max_batch=self.max_batch, max_batch_tokens=2048
        )
        study = Study(settings=self.settings, source=self.source, num_requests=self.requests, policies=("fcfs",))
        self.capacity = study.capacity()

    def arrivals(self, load: float, seed: int, hints: str = "none") -> list[Arrival]:
        """The requests of a seed; the same whatever the hints."""
        rng = Random(f"workload {seed}")
        arrivals = self.source.draw(self.requests, load * self.capacity, rng)
        return Hints(hints).put(arrivals, rng)

    def policy(self, policy: str | SkipJoinRules) -> Policy:
        cost = CostModel(self.costs)
        if isinstance(policy, SkipJoinRules):
            return SkipJoin(self.max_batch, cost, policy)
        return make_policy(policy, max_batch=self.max_batch, cost=cost)

    def run(self, policy: str | SkipJoinRules, arrivals: Sequence[Arrival]) -> Latency:
        summary = summarise([done.normalized_latency_s for done in self.finished(policy, arrivals)])
        return Latency(summary["mean"] or 0.0, summary["p99"] or 0.0)

    def finished(self, policy: str | SkipJoinRules, arrivals: Sequence[Arrival]) -> list[Finished]:
        engine = SimulatedEngine(self.settings, self.policy(policy))
        engine.run(arrivals)
        return [engine.finished[number] for number in range(len(arrivals))]


def site(workload: str, traces: Path, max_batch: int, requests: int) -> Site:
    return Site(source_of(workload, traces), max_batch, requests, costs_of())


@dataclass(frozen=True)
class Ratios:
    """Runs of a policy against those of another, seed by seed."""

    mean: float
    p99: float
    worst: float
    """The largest ratio of the means of one seed."""
    p99_added_s: float
    """What the policy adds to the 99th percentile."""


def ratios(ours: Sequence[Latency], base: Sequence[Latency]) -> Ratios:
    """Of the averages over the seeds."""
    p99, base_p99 = (fmean(run.p99 for run in runs) for runs in (ours, base))
    return Ratios(
        fmean(run.mean for run in ours) / fmean(run.mean for run in base),
        p99 / base_p99,
        max(run.mean / other.mean for run, other in zip(ours, base, strict=True)),
        p99 - base_p99,
    )


def verdict(passed: bool) -> str:
    return "pass" if passed else "**FAIL**"
