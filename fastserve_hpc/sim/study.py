"""Comparisons: the same workloads under several policies, rates and seeds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from fastserve_hpc.errors import ConfigError
from fastserve_hpc.sim.engine import EngineSettings, Finished, SimulatedEngine
from fastserve_hpc.sim.workload import Arrival, Hints, Source
from fastserve_hpc.stats import summarise

_STEADY = (0.2, 0.8)
"""The part of the requests, by arrival, that counts as steady: before it the queue fills, after it drains."""
_MIN_CAPACITY_REQUESTS = 400


@dataclass(frozen=True, slots=True)
class Point:
    """One simulated run."""

    policy: str
    kv_policy: str
    rate: float
    load: float | None
    """The rate as a fraction of capacity, where that was asked for."""
    seed: int
    normalized_latency_s: dict[str, float | None]
    ttft_s: dict[str, float | None]
    steady_normalized_latency_s: dict[str, float | None]
    """Of the requests in the middle alone, without those of the beginning and the end."""
    backlog_growth: float
    """How much longer than the first requests the last ones take to their first token, a second of arrivals:
    near 0 in a steady state."""
    iterations: int
    preemptions: int
    kv_evictions: int
    offloaded_bytes: int
    uploaded_bytes: int
    recomputed_tokens: int
    """Positions whose KV was given up and computed again."""
    stall_s: float
    makespan_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What is compared. Every policy meets the same requests at the same times."""

    settings: EngineSettings
    source: Source
    num_requests: int
    policies: tuple[str, ...]
    kv_policies: tuple[str, ...] = ("recompute",)
    seeds: tuple[int, ...] = (0,)
    hints: Hints = field(default_factory=lambda: Hints("none"))

    def at_rates(self, rates: Sequence[float]) -> Iterator[Point]:
        """The points of all rates (requests a second), policies and seeds."""
        for rate in rates:
            yield from self._points(rate, None)

    def at_loads(self, loads: Sequence[float]) -> Iterator[Point]:
        """The points of all loads, as fractions of `capacity`."""
        capacity = self.capacity()
        for load in loads:
            yield from self._points(load * capacity, load)

    def capacity(self) -> float:
        """Requests a second that fcfs gets done while its queue is never empty."""
        rng = Random("capacity")
        count = max(_MIN_CAPACITY_REQUESTS, self.num_requests, 4 * self.settings.max_batch)
        arrivals: list[Arrival] = []
        while len(arrivals) < count:
            arrivals += self.source.draw(min(self.num_requests, count - len(arrivals)), 1.0, rng)
        arrivals = [replace(arrival, arrival_s=0.0) for arrival in arrivals]
        rng.shuffle(arrivals)
        engine = SimulatedEngine(self.settings, "fcfs")
        engine.run(arrivals, until_drained=False)
        return _done_so_far(engine, arrivals) / engine.now

    def _points(self, rate: float, load: float | None) -> Iterator[Point]:
        for seed in self.seeds:
            rng = Random(f"workload {seed}")
            arrivals = self.hints.put(self.source.draw(self.num_requests, rate, rng), rng)
            self._check(arrivals)
            for policy in self.policies:
                for kv_policy in self.kv_policies:
                    yield _run(self.settings, arrivals, policy, kv_policy, rate, load, seed)

    def _check(self, arrivals: Sequence[Arrival]) -> None:
        longest = max(arrival.prompt_tokens + arrival.output_tokens for arrival in arrivals)
        if longest > self.settings.kv_tokens - 16:
            raise ConfigError(
                f"a request of {longest} tokens does not fit in a KV cache of {self.settings.kv_tokens}: "
                "give more --kv-tokens or shorten with --scale-prompts"
            )


def _done_so_far(engine: SimulatedEngine, arrivals: Sequence[Arrival]) -> float:
    """Requests that are finished, and the parts of those that run."""
    done = float(len(engine.finished))
    for number in engine.scheduler.request_ids():
        done += engine.scheduler.num_outputs(number) / arrivals[number].output_tokens
    return done


def _run(
    settings: EngineSettings,
    arrivals: Sequence[Arrival],
    policy: str,
    kv_policy: str,
    rate: float,
    load: float | None,
    seed: int,
) -> Point:
    engine = SimulatedEngine(settings, policy, kv_policy)
    engine.run(arrivals)
    kv, block_bytes = engine.scheduler.kv, settings.link.block_bytes * settings.num_ranks
    finished = [engine.finished[number] for number in range(len(arrivals))]
    steady = finished[int(len(finished) * _STEADY[0]) : int(len(finished) * _STEADY[1])]
    return Point(
        policy=policy,
        kv_policy=kv_policy,
        rate=rate,
        load=load,
        seed=seed,
        normalized_latency_s=summarise([done.normalized_latency_s for done in finished]),
        ttft_s=summarise([done.ttft_s for done in finished]),
        steady_normalized_latency_s=summarise([done.normalized_latency_s for done in steady]),
        backlog_growth=_growth(finished),
        iterations=engine.scheduler.counters.iterations,
        preemptions=engine.preemptions,
        kv_evictions=engine.scheduler.counters.preemptions,
        offloaded_bytes=round(kv.num_offloaded * block_bytes),
        uploaded_bytes=round(kv.num_uploaded * block_bytes),
        recomputed_tokens=kv.counters.recomputed_tokens,
        stall_s=engine.stall_s,
        makespan_s=engine.now,
    )


def _growth(finished: Sequence[Finished]) -> float:
    quarter = max(1, len(finished) // 4)
    first, last = finished[quarter : 2 * quarter] or finished, finished[-quarter:]
    span = last[0].arrival.arrival_s - first[0].arrival.arrival_s
    waits = [sum(done.ttft_s for done in part) / len(part) for part in (first, last)]
    return (waits[1] - waits[0]) / span if span > 0 else 0.0


def as_json(points: Sequence[Point]) -> dict[str, Any]:
    """What `fastserve-hpc simulate --json` prints."""
    return {"points": [{name: getattr(point, name) for name in Point.__slots__} for point in points]}
