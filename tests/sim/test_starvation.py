"""Nobody starves under skip-join: the bound of docs/scheduling.md, for whatever comes."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastserve_hpc.core.cost import CostModel, Costs
from fastserve_hpc.core.policy.sizing import SkipJoinRules
from fastserve_hpc.core.policy.skip_join import SkipJoin
from fastserve_hpc.sim.engine import EngineSettings, SimulatedEngine
from fastserve_hpc.sim.workload import Arrival

COSTS = Costs(fixed_s=0.01, prefill_token_s=0.001, prefill_attention_s=0, decode_sequence_s=0.001, kv_token_s=0)
CHUNK = 64


def simulate(arrivals: list[Arrival], max_batch: int, rules: SkipJoinRules) -> SimulatedEngine:
    limits = EngineSettings(costs=COSTS, kv_tokens=1_000_000, max_batch=max_batch, max_batch_tokens=CHUNK)
    engine = SimulatedEngine(limits, SkipJoin(max_batch, CostModel(COSTS), rules))
    engine.run(arrivals)
    return engine


def work(arrival: Arrival, max_batch: int) -> float:
    """In output tokens: the prompt's worth, one for each of its iterations, and the answer."""
    ratio = COSTS.prefill_token_s / COSTS.output_token_s(max_batch)
    return arrival.prompt_tokens * (ratio + 1) + arrival.output_tokens


def bound_s(engine: SimulatedEngine, arrivals: list[Arrival], number: int, max_batch: int, share: float) -> float:
    """(work of older requests + its own + that of those pinned already) / share, then its own iterations."""
    one = arrivals[number]
    older = [a for i, a in enumerate(arrivals[:number]) if engine.finished[i].finish_s > one.arrival_s]
    largest = max(work(arrival, max_batch) for arrival in arrivals)
    total = sum(work(arrival, max_batch) for arrival in (*older, one)) + math.ceil(share * max_batch) * largest
    iteration_s = COSTS.fixed_s + CHUNK * COSTS.prefill_token_s + max_batch * COSTS.decode_sequence_s
    alone_s = iteration_s * (one.prompt_tokens + one.output_tokens)
    return COSTS.output_token_s(max_batch) * total / share + alone_s


def stream(rng: Random, max_batch: int, load: float, long: list[int], longest: int, count: int) -> list[Arrival]:
    """Short requests without end, and a few long ones early on."""
    short = [(rng.randint(1, 20), rng.randint(1, longest)) for _ in range(count)]
    mean_s = sum(COSTS.prefill_s(0, p) + o * COSTS.output_token_s(max_batch) for p, o in short) / count
    rate = load / mean_s
    now, arrivals = 0.0, []
    for i, lengths in enumerate(short):
        now += rng.expovariate(rate)
        arrivals.append(Arrival(now, *lengths))
        if i % 10 == 9 and long:
            arrivals.append(Arrival(now, 10, long.pop()))
    return arrivals


@settings(max_examples=12, deadline=None)
@example(seed=0, max_batch=3, load=3.0, long=[40], longest=1, ages=False)
@example(seed=4246, max_batch=2, load=3.0, long=[40], longest=1, ages=False)
@given(
    seed=st.integers(0, 10**6),
    max_batch=st.integers(1, 5),
    load=st.floats(0.8, 3.0),
    long=st.lists(st.integers(40, 120), min_size=1, max_size=3),
    longest=st.integers(1, 12),
    ages=st.booleans(),
)
def test_every_request_is_done_within_the_bound(
    seed: int, max_batch: int, load: float, long: list[int], longest: int, ages: bool
) -> None:
    rules = SkipJoinRules(quantum=4, min_finished=5, oldest_share=0.2, aging=0.6 if ages else math.inf)
    arrivals = stream(Random(seed), max_batch, load, long, longest, 500)
    engine = simulate(arrivals, max_batch, rules)
    for number, done in engine.finished.items():
        assert done.finish_s - done.arrival.arrival_s <= bound_s(engine, arrivals, number, max_batch, 0.2)


@pytest.mark.parametrize(("share", "is_bounded"), [(0.2, True), (0.0, False)])
def test_the_oldest_share_is_what_bounds(share: float, is_bounded: bool) -> None:
    rules = SkipJoinRules(quantum=4, min_finished=5, oldest_share=share, aging=math.inf)
    arrivals = stream(Random(1), 2, 1.5, [100], 10, 2500)
    engine = simulate(arrivals, 2, rules)
    number = next(i for i, arrival in enumerate(arrivals) if arrival.output_tokens == 100)
    took = engine.finished[number].finish_s - arrivals[number].arrival_s
    assert (took <= bound_s(engine, arrivals, number, 2, 0.2)) == is_bounded


def test_a_long_answer_among_short_ones_takes_little_longer_than_under_fcfs() -> None:
    rng = Random(4)
    arrivals = stream(rng, 16, 1.2, [4000], 60, 2500)
    limits = EngineSettings(costs=COSTS, kv_tokens=1_000_000, max_batch=16, max_batch_tokens=2048)
    number = next(i for i, arrival in enumerate(arrivals) if arrival.output_tokens == 4000)
    times = []
    for policy in ("fcfs", "skip-join"):
        engine = SimulatedEngine(limits, policy)
        engine.run(arrivals)
        times.append(engine.finished[number].finish_s - arrivals[number].arrival_s)
    assert times[1] <= 1.5 * times[0]
