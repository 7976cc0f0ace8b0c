from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from fastserve_hpc.core.cost import CostModel, Costs, load_of
from fastserve_hpc.core.kv_manager import KvManager
from fastserve_hpc.core.plan import IterationPlan, IterationResult
from fastserve_hpc.core.policy.by_class import ByClass
from fastserve_hpc.core.policy.fcfs import Fcfs
from fastserve_hpc.core.request import Request, SamplingParams, ServiceClass
from fastserve_hpc.core.scheduler import Scheduler
from fastserve_hpc.core.slowdown import QUIET_S
from fastserve_hpc.sim.engine import EngineSettings, SimulatedEngine
from fastserve_hpc.sim.workload import Arrival
from fastserve_hpc.stats import percentile

COSTS = Costs(fixed_s=12e-3, prefill_token_s=4e-4, decode_sequence_s=8e-4)


class Bench:
    """A scheduler on a clock that iterations advance as the cost model predicts."""

    def __init__(self, num_blocks: int = 4096, **settings: float) -> None:
        limits = {"max_batch": 64, "max_batch_tokens": 512, **settings}
        kv = KvManager(num_blocks, 16)
        self.scheduler = Scheduler(ByClass(Fcfs), kv, cost=CostModel(COSTS), **limits)  # type: ignore[arg-type]
        self.now = 0.0
        self._next_id = 0

    def add(self, kind: ServiceClass, prompt_len: int = 20, max_tokens: int = 100, **fields: float) -> int:
        self._next_id += 1
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0)
        request = Request(self._next_id, (1,) * prompt_len, sampling, service_class=kind)
        self.scheduler.add(replace(request, **fields), self.now)  # type: ignore[arg-type]
        return self._next_id

    def step(self) -> IterationPlan:
        plan = self.scheduler.schedule(self.now)
        assert plan is not None
        self.now += self.seconds(plan)
        samples = (1,) * sum(piece.samples for piece in plan.slices)
        self.scheduler.update(IterationResult(plan.plan_id, samples), self.now)
        self.scheduler.check(self.now)
        return plan

    @staticmethod
    def seconds(plan: IterationPlan, only: int | None = None) -> float:
        return COSTS.predict(load_of([s for s in plan.slices if only in (None, s.request_id)]))


def test_interactive_requests_go_first_whatever_came_first() -> None:
    bench = Bench()
    for _ in range(80):
        bench.add("batch")
    live = bench.add("interactive")
    assert bench.step().slices[0].request_id == live


def test_without_interactive_requests_a_batch_fills_everything() -> None:
    bench = Bench()
    for _ in range(100):
        bench.add("batch", slowdown=1.25)
    assert bench.step().num_tokens == 512
    for _ in range(10):
        plan = bench.step()
    assert len(plan.slices) == 64


@pytest.mark.parametrize("slowdown", [1.25, 2.0, 4.0, math.inf])
def test_an_iteration_with_interactive_work_takes_at_most_s_times_as_long(slowdown: float) -> None:
    bench = Bench()
    for _ in range(100):
        bench.add("batch", slowdown=slowdown)
    live = bench.add("interactive", max_tokens=200)
    began, base_s, shares = bench.now, 0.0, []
    for _ in range(100):
        plan = bench.step()
        alone_s = bench.seconds(plan, live)
        base_s += alone_s
        shares.append(bench.seconds(plan) / alone_s)
        assert bench.now - began <= slowdown * base_s
    assert max(shares) <= slowdown
    if slowdown < 5:
        assert shares[-1] > 1 + 0.5 * (slowdown - 1)  # and the room is used
    else:
        assert len(plan.slices) == 64


def test_whoever_may_arrive_does_not_wait_long_until_nobody_comes_any_more() -> None:
    bench = Bench()
    live = bench.add("interactive", prompt_len=100, max_tokens=2)
    first_token_s = bench.seconds(bench.step(), live)
    bench.step()
    for _ in range(20):
        bench.add("batch", prompt_len=2000, slowdown=2.0)
    for _ in range(30):
        plan = bench.step()
        assert bench.seconds(plan) <= 1.001 * max(first_token_s, COSTS.fixed_s + 16 * COSTS.prefill_token_s)
    bench.now += QUIET_S
    assert bench.step().num_tokens == 512


def test_what_was_waited_for_the_end_of_a_batch_iteration_is_made_up_for() -> None:
    bench = Bench()
    for _ in range(20):
        bench.add("batch", prompt_len=2000, slowdown=2.0)
    bench.step()
    bench.now -= 0.2  # it came while that ran
    live = bench.add("interactive", prompt_len=50)
    bench.now += 0.2
    assert [piece.request_id for piece in bench.step().slices] == [live]


def test_the_tightest_bound_and_the_server_s_own_hold() -> None:
    bench = Bench(max_slowdown=1.5)
    batch = [bench.add("batch", slowdown=math.inf) for _ in range(100)]
    live = bench.add("interactive")
    for _ in range(20):
        plan = bench.step()
        assert bench.seconds(plan) <= 1.5 * bench.seconds(plan, live)
    bench.scheduler.set_slowdown(10**6, 2.0)  # gone
    for request_id in batch:
        bench.scheduler.set_slowdown(request_id, 1.0)
    assert [piece.request_id for piece in bench.step().slices] == [live]


def test_a_batch_gives_its_blocks_first() -> None:
    bench = Bench(num_blocks=40)
    for _ in range(10):
        bench.add("batch", prompt_len=60)
    for _ in range(5):
        bench.step()
    live = bench.add("interactive", prompt_len=500)
    assert live in {piece.request_id for piece in bench.step().slices}
    assert bench.scheduler.counters.preemptions > 0


def latencies(slowdown: float, num_batch: int) -> tuple[float, float, float]:
    """p95 of TTFT and of seconds per token of interactive requests, and batch tokens a second."""
    rng = random.Random(1)
    lengths = [(rng.randint(5, 200), rng.randint(5, 80)) for _ in range(40)]
    batch = [Arrival(0.0, *rng.choice(lengths), service_class="batch") for _ in range(num_batch)]
    now, live = 0.0, []
    for _ in range(150):
        now += random.Random(now).expovariate(1.8)
        live.append(Arrival(now, *rng.choice(lengths)))
    settings = EngineSettings(costs=COSTS, kv_tokens=200_000, max_batch=64, max_batch_tokens=512)
    engine = SimulatedEngine(settings, ByClass(Fcfs))
    take = engine.scheduler.add
    engine.scheduler.add = lambda request, at: take(replace(request, slowdown=slowdown), at)  # type: ignore[method-assign]
    engine.run([*batch, *live])
    done = [engine.finished[num_batch + i] for i in range(len(live))]
    end = max(finished.finish_s for finished in done)
    others = [engine.finished[number] for number in range(num_batch)]
    tokens = sum(finished.arrival.output_tokens for finished in others if finished.finish_s < end)
    ttft_s = percentile(sorted(finished.ttft_s for finished in done), 95)
    token_s = percentile(sorted(finished.normalized_latency_s for finished in done), 95)
    assert ttft_s is not None
    assert token_s is not None
    return ttft_s, token_s, tokens / end


def test_under_poisson_load_the_bounds_hold_and_a_wider_one_gives_more() -> None:
    ttft_s, token_s, _ = latencies(2.0, 0)
    rates = []
    for slowdown in (1.25, 2.0, 4.0):
        beside = latencies(slowdown, 700)
        assert beside[0] <= slowdown * ttft_s
        assert beside[1] <= slowdown * token_s
        rates.append(beside[2])
    assert rates[0] > 0
    assert rates == sorted(rates)
