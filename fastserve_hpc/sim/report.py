"""Points in short: means over seeds with their confidence, ratios to fcfs, crossings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fastserve_hpc.sim.study import Point

# Two-sided 95 % quantiles of Student's t by degrees of freedom.
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
_NORMAL95 = 1.96

Measure = Callable[[Point], float]


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds and the half width of its 95 % confidence interval (None: one seed)."""

    mean: float
    half: float | None

    def __str__(self) -> str:
        return f"{self.mean:.4f}" if self.half is None else f"{self.mean:.4f} ±{self.half:.4f}"


def interval(values: Sequence[float]) -> Interval:
    """Of at least one value."""
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Interval(mean, None)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    t = _T95[len(values) - 2] if len(values) - 2 < len(_T95) else _NORMAL95
    return Interval(mean, t * math.sqrt(variance / len(values)))


def latency(which: str) -> Measure:
    """The measure of a point: `which` ("mean", "p95", ...) of the seconds per output token."""
    return lambda point: point.normalized_latency_s[which] or 0.0


@dataclass(frozen=True, slots=True)
class Group:
    """The points that differ only in their seed."""

    policy: str
    kv_policy: str
    rate: float
    load: float | None
    points: tuple[Point, ...]

    def over_seeds(self, measure: Measure) -> Interval:
        return interval([measure(point) for point in self.points])

    @property
    def name(self) -> str:
        return f"{self.policy}/{self.kv_policy}"


def grouped(points: Sequence[Point]) -> list[Group]:
    """In the order in which they first come."""
    groups: dict[tuple[str, str, float, float | None], list[Point]] = {}
    for point in points:
        groups.setdefault((point.policy, point.kv_policy, point.rate, point.load), []).append(point)
    return [Group(*key, points=tuple(members)) for key, members in groups.items()]


def curve(groups: Sequence[Group], name: str, measure: Measure) -> list[tuple[float, float]]:
    """(rate, value) of one policy, by rate."""
    return sorted((group.rate, group.over_seeds(measure).mean) for group in groups if group.name == name)


def crossing(points: Sequence[tuple[float, float]], limit: float) -> float | None:
    """The rate at which the curve first rises above `limit`, between its points linearly; None if it never does."""
    for (rate, low), (next_rate, high) in pairwise(points):
        if low <= limit < high:
            return rate + (next_rate - rate) * (limit - low) / (high - low)
    return None


COLUMNS = ("policy", "kv", "rate", "load", "mean s/token", "p50", "p95", "p99", "ttft p99", "preempt", "growth")


def rows(points: Sequence[Point]) -> list[tuple[str, ...]]:
    """A table, as `COLUMNS`."""
    return [_row(group) for group in grouped(points)]


def _row(group: Group) -> tuple[str, ...]:
    return (
        group.policy,
        group.kv_policy,
        f"{group.rate:.3f}",
        "-" if group.load is None else f"{group.load:.2f}",
        str(group.over_seeds(latency("mean"))),
        *(f"{group.over_seeds(latency(which)).mean:.4f}" for which in ("p50", "p95", "p99")),
        f"{group.over_seeds(lambda point: point.ttft_s['p99'] or 0.0).mean:.2f}",
        f"{group.over_seeds(lambda point: point.preemptions).mean:.0f}",
        f"{group.over_seeds(lambda point: point.backlog_growth).mean:.2f}",
    )
