"""The workloads by which engines are compared, under the names that docs/performance.md uses."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from fastserve_hpc.bench.trace import Load


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, and whether each waits for the one before it (a single stream) instead of for its time."""

    name: str
    loads: list[Load]
    one_by_one: bool = False


def named(name: str, requests: int | None = None, rate: float | None = None) -> Workload:
    """A workload of `WORKLOADS`, with another number of requests or, where they arrive over time, another rate."""
    return _MAKERS[name](requests, rate)


def _at_once(requests: int | None, _: float | None) -> Workload:
    return Workload("w1", [Load(0.0, 128, 64)] * (requests or 64))


def _poisson(requests: int | None, rate: float | None) -> Workload:
    """Lengths as people's chats have them, and the same pattern of arrivals at every rate."""
    lengths, arrivals, due_s = random.Random(0), random.Random(1), 0.0
    loads = []
    for _ in range(requests or 100):
        prompt_tokens, output_tokens = _lognormal(lengths, 60, 1.0, 8, 512), _lognormal(lengths, 40, 0.9, 4, 256)
        due_s += arrivals.expovariate(1.0) / (rate or DEFAULT_RATE)
        loads.append(Load(due_s, prompt_tokens, output_tokens))
    return Workload("w2", loads)


def _single_stream(requests: int | None, _: float | None) -> Workload:
    return Workload("w3", [Load(0.0, 128, 128)] * (requests or 5), one_by_one=True)


def _lognormal(rng: random.Random, median: float, sigma: float, low: int, high: int) -> int:
    return min(high, max(low, round(median * math.exp(rng.gauss(0, sigma)))))


DEFAULT_RATE = 5.4
"""Requests a second of w2."""
_MAKERS: dict[str, Callable[[int | None, float | None], Workload]] = {
    "w1": _at_once,
    "w2": _poisson,
    "w3": _single_stream,
}
WORKLOADS = tuple(_MAKERS)
