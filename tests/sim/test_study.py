"""Studies and their reports."""

from __future__ import annotations

import pytest

from fastserve_hpc.core.cost import Costs
from fastserve_hpc.errors import ConfigError
from fastserve_hpc.sim.engine import EngineSettings
from fastserve_hpc.sim.lengths import QuantileLengths
from fastserve_hpc.sim.report import crossing, curve, grouped, interval, latency, rows
from fastserve_hpc.sim.study import Study, as_json
from fastserve_hpc.sim.workload import DrawnSource

COSTS = Costs(fixed_s=0.01, prefill_token_s=0.0, prefill_attention_s=0, decode_sequence_s=0, kv_token_s=0)


def study(**changes: object) -> Study:
    plain: dict[str, object] = {
        "settings": EngineSettings(costs=COSTS, kv_tokens=10_000, max_batch=4, max_batch_tokens=64),
        "source": DrawnSource(QuantileLengths((10, 10), (10, 50))),
        "num_requests": 100,
        "policies": ("fcfs",),
    }
    return Study(**{**plain, **changes})  # type: ignore[arg-type]


def test_capacity_is_what_a_full_batch_gets_done() -> None:
    assert study().capacity() == pytest.approx(4 / 30 / 0.01, rel=0.05)


def test_every_policy_meets_the_same_requests() -> None:
    points = list(study(policies=("fcfs", "srpt"), seeds=(0, 1)).at_rates([2.0]))
    assert [(point.policy, point.seed) for point in points] == [("fcfs", 0), ("srpt", 0), ("fcfs", 1), ("srpt", 1)]
    assert points[0].normalized_latency_s["mean"] == pytest.approx(points[1].normalized_latency_s["mean"], rel=0.1)
    assert points == list(study(policies=("fcfs", "srpt"), seeds=(0, 1)).at_rates([2.0])), "all of it repeats"


def test_steady_state_and_growth_are_told_apart() -> None:
    calm, crowded = study(num_requests=400).at_loads([0.5, 1.5])
    assert abs(calm.backlog_growth) < 0.02
    assert crowded.backlog_growth > 0.2
    assert (calm.load, crowded.load) == (0.5, 1.5)
    assert crowded.rate == pytest.approx(3 * calm.rate)


def test_a_request_that_cannot_fit_is_named() -> None:
    small = EngineSettings(costs=COSTS, kv_tokens=64, max_batch=4, max_batch_tokens=64)
    with pytest.raises(ConfigError, match=r"a request of 6\d tokens does not fit in a KV cache of 64"):
        list(study(settings=small).at_rates([1.0]))


def test_report() -> None:
    points = list(study(seeds=(0, 1, 2), policies=("fcfs", "skip-join")).at_loads([0.5, 1.2]))
    groups = grouped(points)
    assert [(group.policy, group.load, len(group.points)) for group in groups] == [
        ("fcfs", 0.5, 3),
        ("skip-join", 0.5, 3),
        ("fcfs", 1.2, 3),
        ("skip-join", 1.2, 3),
    ]
    assert len(rows(points)) == 4
    line = curve(groups, "fcfs/recompute", latency("mean"))
    assert line[0][0] < line[1][0]
    assert line[0][1] < line[1][1]
    point = as_json(points)["points"][0]
    wanted = "policy kv_policy rate load seed normalized_latency_s ttft_s iterations preemptions offloaded_bytes "
    assert {*wanted.split(), "uploaded_bytes", "stall_s", "makespan_s"} <= point.keys()
    assert set(point["ttft_s"]) == {"mean", "p50", "p90", "p95", "p99"}


def test_intervals_and_crossings() -> None:
    three = interval([1.0, 2.0, 3.0])
    assert (three.mean, three.half) == (2.0, pytest.approx(4.30 / 3**0.5))
    assert interval([5.0]).half is None
    assert crossing([(1, 0.1), (2, 0.2), (3, 0.4), (4, 0.1), (5, 0.9)], 0.3) == pytest.approx(2.5)
    assert crossing([(1, 0.1), (2, 0.2)], 0.3) is None
