"""The scheduler of the server under a virtual clock, with a cost model for ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from fastserve_hpc.core.cost import CostModel, Costs, IterationLoad, load_of
from fastserve_hpc.core.kv_manager import KvManager
from fastserve_hpc.core.kv_policy import KV_POLICIES, KvPolicy
from fastserve_hpc.core.plan import IterationPlan, IterationResult, TokenDelta
from fastserve_hpc.core.policy import make_policy
from fastserve_hpc.core.policy.base import Policy
from fastserve_hpc.core.request import Request, SamplingParams
from fastserve_hpc.core.scheduler import Scheduler
from fastserve_hpc.sim.copies import Link, SimulatedCopies
from fastserve_hpc.sim.workload import Arrival

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The simulated server."""

    costs: Costs
    kv_tokens: int
    max_batch: int
    max_batch_tokens: int
    num_stages: int = 1
    num_ranks: int = 1
    host_kv_tokens: int = 0
    link: Link = field(default_factory=Link)
    """Between the tiers of a rank."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A request's times, in seconds of the virtual clock."""

    arrival: Arrival
    first_token_s: float
    finish_s: float

    @property
    def normalized_latency_s(self) -> float:
        """From arrival to end, a second per output token."""
        return (self.finish_s - self.arrival.arrival_s) / self.arrival.output_tokens

    @property
    def ttft_s(self) -> float:
        """From arrival to the first token."""
        return self.first_token_s - self.arrival.arrival_s


class SimulatedRanks:
    """The pipeline: each stage takes its share of an iteration's time, one plan after the other."""

    def __init__(self, costs: Costs, num_stages: int):
        self._costs = costs
        self._stages_free = [0.0] * num_stages

    @property
    def free_s(self) -> float:
        """When the first stage can begin another plan."""
        return self._stages_free[0]

    def execute(self, load: IterationLoad, now: float) -> float:
        """When the plan that starts now is through all stages."""
        stage_s = self._costs.predict(load) / len(self._stages_free)
        for stage, free in enumerate(self._stages_free):
            now = max(now, free) + stage_s
            self._stages_free[stage] = now
        return now


class SimulatedEngine:
    """One run: a workload through a scheduler. All requests take exactly their `output_tokens`."""

    def __init__(self, settings: EngineSettings, policy: str | Policy, kv_policy: KvPolicy | str = "recompute"):
        cost = CostModel(settings.costs.scaled(1 / settings.num_stages))
        if isinstance(policy, str):
            policy = make_policy(policy, max_batch=settings.max_batch, cost=cost, num_stages=settings.num_stages)
        kv = KvManager(
            max(1, settings.kv_tokens // BLOCK_SIZE),
            BLOCK_SIZE,
            settings.host_kv_tokens // BLOCK_SIZE,
            policy=KV_POLICIES[kv_policy] if isinstance(kv_policy, str) else kv_policy,
            copy_costs=settings.link.costs,
        )
        self.scheduler = Scheduler(
            policy,
            kv,
            max_batch=settings.max_batch,
            max_batch_tokens=settings.max_batch_tokens,
            num_stages=settings.num_stages,
            cost=cost,
        )
        self.now = 0.0
        self.finished: dict[int, Finished] = {}
        """By the number of arrival."""
        self.preemptions = 0
        """Times that a request which was computed was not in the next plan, though not done."""
        self.stall_s = 0.0
        """Time in which the ranks had nothing to do but wait for copies."""
        self._ranks = SimulatedRanks(settings.costs, settings.num_stages)
        self._copies = SimulatedCopies(settings.link)
        self._results: deque[tuple[float, IterationResult]] = deque()
        self._first_tokens: dict[int, float] = {}
        self._arrivals: Sequence[Arrival] = ()
        self._num_arrived = 0
        window = 2 * settings.num_stages - 1
        self._in_last_plans: deque[set[int]] = deque([set()] * window, window)

    def run(self, arrivals: Sequence[Arrival], until_drained: bool = True) -> None:
        """Until all requests are done; else until the last of them has begun to run."""
        self._arrivals = arrivals
        while len(self.finished) < len(arrivals):
            self._take_arrivals(self.now)
            if not until_drained and self._num_arrived == len(arrivals) and not self.scheduler.num_waiting:
                return
            self.scheduler.acknowledge(self._copies.done(self.now))
            plan = self.scheduler.schedule(self.now) if self._ranks.free_s <= self.now else None
            if plan is not None:
                if plan.copies:
                    self._copies.start(plan.copies, self.now)
                if plan.slices:
                    self._execute(plan)
            else:
                self._advance()

    def _take_arrivals(self, now: float) -> None:
        arrivals = self._arrivals
        while self._num_arrived < len(arrivals) and arrivals[self._num_arrived].arrival_s <= now:
            arrival = arrivals[self._num_arrived]
            self.scheduler.add(_request(self._num_arrived, arrival), arrival.arrival_s)
            self._num_arrived += 1

    def _execute(self, plan: IterationPlan) -> None:
        begin = self.now
        if plan.needs_copies:
            begin = max(begin, self._copies.uploaded_s(plan.needs_copies))
            self.stall_s += begin - self.now
        done = self._ranks.execute(load_of(plan.slices), begin)
        token_ids = (1,) * sum([piece.samples for piece in plan.slices])
        self._results.append((done, IterationResult(plan.plan_id, token_ids)))
        self._count_preemptions({piece.request_id for piece in plan.slices})

    def _count_preemptions(self, planned: set[int]) -> None:
        left = self._in_last_plans[0] - planned
        self._in_last_plans.append(planned)
        if left:
            later: set[int] = set().union(*self._in_last_plans)
            self.preemptions += sum(1 for number in left - later if number not in self.finished)

    def _advance(self) -> None:
        """To the next moment at which something can change."""
        next_s = max(self.now, min(self._next_times()))
        if not self._results and self.scheduler.num_waiting + self.scheduler.num_running:
            self.stall_s += next_s - self.now
        self.now = next_s
        while self._results and self._results[0][0] <= self.now:
            done, result = self._results.popleft()
            self._take_arrivals(done)
            for delta in self.scheduler.update(result, done):
                self._note(delta, done)

    def _next_times(self) -> list[float]:
        times = [self._results[0][0]] if self._results else []
        copied_s = self._copies.next_s()
        if copied_s is not None and not self._results:
            times.append(copied_s)
        if self._ranks.free_s > self.now:
            times.append(self._ranks.free_s)
        elif self.scheduler.num_in_flight < self.scheduler.num_stages and self._num_arrived < len(self._arrivals):
            times.append(self._arrivals[self._num_arrived].arrival_s)
        return times

    def _note(self, delta: TokenDelta, now: float) -> None:
        number = delta.request_id
        if number not in self._first_tokens:
            self._first_tokens[number] = now
        if delta.finish_reason is not None:
            self.finished[number] = Finished(self._arrivals[number], self._first_tokens.pop(number), now)


def _request(number: int, arrival: Arrival) -> Request:
    sampling = SamplingParams(max_tokens=arrival.output_tokens, temperature=0.0, seed=0)
    prompt = (0,) * arrival.prompt_tokens
    return Request(
        number,
        prompt,
        sampling,
        service_class=arrival.service_class,
        session=arrival.session,
        expected_tokens=arrival.hint,
    )
