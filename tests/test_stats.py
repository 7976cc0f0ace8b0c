from __future__ import annotations

import statistics

import pytest

from fastserve_hpc.stats import percentile, summarise


def test_percentiles_are_interpolated() -> None:
    ordered = [1.0, 2.0, 4.0]
    assert [percentile(ordered, p) for p in (0, 25, 50, 75, 100)] == [1.0, 1.5, 2.0, 3.0, 4.0]


def test_summary_agrees_with_the_standard_library() -> None:
    values = [float(i * i % 97) for i in range(250)]
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    summary = summarise(values)
    assert summary["mean"] == pytest.approx(statistics.mean(values))
    for p in (50, 90, 95, 99):
        assert summary[f"p{p}"] == pytest.approx(cuts[p - 1])


def test_of_nothing_every_figure_is_none() -> None:
    assert summarise([]) == {"mean": None, "p50": None, "p90": None, "p95": None, "p99": None}
