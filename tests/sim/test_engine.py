"""The virtual clock: small runs whose times can be told by hand, and laws that hold for all."""

from __future__ import annotations

import time
from random import Random

import pytest

from fastserve_hpc.core.cost import Costs
from fastserve_hpc.core.policy import POLICIES
from fastserve_hpc.sim.engine import EngineSettings, SimulatedEngine
from fastserve_hpc.sim.hardware import HARDWARE
from fastserve_hpc.sim.lengths import SHAREGPT
from fastserve_hpc.sim.shapes import SHAPES
from fastserve_hpc.sim.workload import Arrival, DrawnSource

FLAT = Costs(fixed_s=1.0, prefill_token_s=0.5, prefill_attention_s=0, decode_sequence_s=0.25, kv_token_s=0)


def settings(costs: Costs = FLAT, **limits: int) -> EngineSettings:
    plain = {"kv_tokens": 100_000, "max_batch": 4, "max_batch_tokens": 64, "num_stages": 1}
    return EngineSettings(costs=costs, **{**plain, **limits})


def times(engine: SimulatedEngine) -> list[tuple[float, float]]:
    return [(done.first_token_s, done.finish_s) for _, done in sorted(engine.finished.items())]


def run(arrivals: list[Arrival], policy: str = "fcfs", **limits: int) -> SimulatedEngine:
    engine = SimulatedEngine(settings(**limits), policy)
    engine.run(arrivals)
    return engine


def test_one_request() -> None:
    engine = run([Arrival(10.0, 4, 3)])
    assert times(engine) == [(13.0, 13.0 + 2 * 1.25)]
    assert engine.finished[0].ttft_s == 3.0
    assert engine.finished[0].normalized_latency_s == pytest.approx(5.5 / 3)


def test_two_share_iterations() -> None:
    engine = run([Arrival(0.0, 2, 4), Arrival(1.0, 2, 2)])
    # 0-2: first prefill; 2-4.25: decode and prefill; 4.25-5.75: two decodes; then one.
    assert times(engine) == [(2.0, 7.0), (4.25, 5.75)]


def test_chunks() -> None:
    engine = run([Arrival(0.0, 10, 1)], max_batch_tokens=4)
    assert times(engine) == [(3 * 1 + 10 * 0.5, 8.0)]


def test_stages_work_side_by_side() -> None:
    alone = run([Arrival(0.0, 2, 5)], num_stages=2)
    both = run([Arrival(0.0, 2, 5), Arrival(0.0, 2, 5)], num_stages=2)
    assert times(alone) == [(2.0, 2.0 + 4 * 1.25)]
    assert times(both)[0][0] == times(alone)[0][0]
    assert max(finish for _, finish in times(both)) < times(alone)[0][1] + 2.0


def test_nothing_happens_between_arrivals() -> None:
    engine = run([Arrival(0.0, 2, 1), Arrival(1e6, 2, 1)])
    assert engine.now == 1e6 + 2
    assert engine.scheduler.counters.iterations == 2


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("limits", [{}, {"num_stages": 2}, {"kv_tokens": 3_000}, {"max_batch_tokens": 100}])
def test_every_request_is_done_once_and_time_is_conserved(policy: str, limits: dict[str, int]) -> None:
    arrivals = DrawnSource(SHAREGPT).draw(60, 20.0, Random(7))
    costs = HARDWARE["a100-80g"].costs(SHAPES["llama-3-8b"])
    engine = SimulatedEngine(settings(costs, **{"max_batch": 8, "max_batch_tokens": 2048, **limits}), policy)
    engine.run(arrivals)
    assert sorted(engine.finished) == list(range(60))
    assert engine.scheduler.counters.output_tokens == sum(arrival.output_tokens for arrival in arrivals)
    assert engine.scheduler.is_idle
    assert engine.scheduler.kv.num_used == 0
    for number, arrival in enumerate(arrivals):
        done = engine.finished[number]
        assert done.first_token_s >= arrival.arrival_s + costs.prefill_s(0, arrival.prompt_tokens)
        assert done.finish_s >= done.first_token_s + (arrival.output_tokens - 1) * costs.fixed_s * 0.99
    if "kv_tokens" not in limits:
        assert engine.scheduler.counters.preemptions == 0


def test_preemptions_are_counted() -> None:
    arrivals = [Arrival(0.0, 10, 40), Arrival(5.0, 10, 2)]
    assert run(arrivals, "fcfs", max_batch=1).preemptions == 0
    assert run(arrivals, "srpt", max_batch=1).preemptions == 1


def test_fast_enough_for_studies() -> None:
    """200,000 iterations a minute at batch 16 are asked for, on a core of its own."""
    arrivals = DrawnSource(SHAREGPT).draw(150, 4.0, Random(1))
    engine = SimulatedEngine(settings(HARDWARE["a100-40g"].costs(SHAPES["opt-13b"]), max_batch=16), "skip-join")
    begin = time.thread_time()
    engine.run(arrivals)
    assert engine.scheduler.counters.iterations / (time.thread_time() - begin) > 200_000 / 60
