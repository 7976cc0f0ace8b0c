"""Latencies in numbers: mean and percentiles."""

from __future__ import annotations

import math
from collections.abc import Sequence

PERCENTILES = (50, 90, 95, 99)


def summarise(values: Sequence[float]) -> dict[str, float | None]:
    """mean, p50, p90, p95 and p99; None for each where there is no value."""
    ordered = sorted(values)
    mean = math.fsum(ordered) / len(ordered) if ordered else None
    return {"mean": mean, **{f"p{p}": percentile(ordered, p) for p in PERCENTILES}}


def percentile(ordered: Sequence[float], percent: float) -> float | None:
    """Of ascending values, with linear interpolation between neighbours; None of no values."""
    if not ordered:
        return None
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
