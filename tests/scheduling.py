"""A scheduler with fake ranks around it, which holds the conservation laws after every step."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator

from fastserve_hpc.core.cost import CostModel
from fastserve_hpc.core.enst import Standing
from fastserve_hpc.core.kv_manager import KvManager
from fastserve_hpc.core.kv_policy import KV_POLICIES
from fastserve_hpc.core.plan import IterationPlan, IterationResult, TokenDelta
from fastserve_hpc.core.policy.base import OrderKey, Policy
from fastserve_hpc.core.policy.clairvoyant import Srpt
from fastserve_hpc.core.policy.fcfs import Fcfs
from fastserve_hpc.core.policy.mlfq import Mlfq, PaperSkipJoin
from fastserve_hpc.core.policy.sizing import SkipJoinRules
from fastserve_hpc.core.policy.skip_join import SkipJoin
from fastserve_hpc.core.request import FinishReason, Request, SamplingParams
from fastserve_hpc.core.scheduler import Scheduler
from fastserve_hpc.core.sequence import Sequence
from fastserve_hpc.worker.fake import EOS, FakeWorker, answer


def request(request_id: int, prompt_len: int = 8, max_tokens: int = 16, shared: int = 0, **sampling: object) -> Request:
    """A request whose prompt differs from that of every other id behind the first `shared` tokens."""
    params = {"max_tokens": max_tokens, "temperature": 0.0, "seed": 0, "stop_token_ids": (EOS,), **sampling}
    prompt = tuple((request_id * 31 * (i >= shared) + i * 7) % 256 for i in range(prompt_len))
    return Request(request_id, prompt, SamplingParams(**params), **_manners(request_id))  # type: ignore[arg-type]


def _manners(request_id: int) -> dict[str, object]:
    """Service classes, sessions and hints, for policies that look at them."""
    return {
        "service_class": "batch" if request_id % 5 == 4 else "interactive",
        "session": "one" if request_id % 7 == 3 else None,
        "expected_tokens": 10 if request_id % 3 == 2 else None,
    }


EAGER = SkipJoinRules(quantum=1, min_finished=0, aging=0.1, oldest_share=0.2)
"""Rules that replace, promote and pin all the time."""


class Reordering:
    """Ranks by any function of (number of arrival, outputs so far): demotes and promotes at will."""

    name = "reordering"

    def __init__(self, key: Callable[[int, int], float]):
        self._key = key
        self._numbers: dict[int, int] = {}
        self._sequences: dict[int, Sequence] = {}

    def add(self, sequence: Sequence, now: float) -> None:  # noqa: ARG002
        self._numbers[sequence.request_id] = len(self._numbers)
        self._sequences[sequence.request_id] = sequence

    def remove(self, sequence: Sequence, is_complete: bool) -> None:  # noqa: ARG002
        del self._sequences[sequence.request_id]

    def on_progress(self, sequence: Sequence, num_tokens: int, now: float) -> None:  # noqa: ARG002
        assert self._sequences[sequence.request_id] is sequence
        assert num_tokens > 0

    def ranked(self, now: float) -> Iterator[Sequence]:  # noqa: ARG002
        return iter(sorted(self._sequences.values(), key=self.order_key))

    def counters(self) -> dict[str, float]:
        return {}

    def order_key(self, sequence: Sequence) -> OrderKey:
        number = self._numbers[sequence.request_id]
        return (self._key(number, len(sequence.outputs)), number)


class SecondLeaves(Reordering):
    """Last come, first served; where blocks are short, the second to come leaves first: it is the last to run."""

    def __init__(self) -> None:
        super().__init__(lambda number, _: -number)

    def standing(self, sequence: Sequence, now: float) -> Standing:  # noqa: ARG002
        return Standing(float(self._numbers[sequence.request_id] == 1), math.inf)


POLICIES: dict[str, Callable[[], Policy]] = {
    "fcfs": Fcfs,
    "last come": lambda: Reordering(lambda number, _: -number),
    "second leaves": SecondLeaves,
    "levels": lambda: Reordering(lambda _, outputs: outputs // 4),
    "shuffled": lambda: Reordering(lambda number, outputs: hash((number, outputs)) % 997),
    "mlfq": lambda: Mlfq(CostModel()),
    "skip-join-paper": lambda: PaperSkipJoin(CostModel()),
    "skip-join": lambda: SkipJoin(4, CostModel(), EAGER),
    "srpt": lambda: Srpt(8, CostModel()),
}


class Ranks:
    """A scheduler, the first rank (which computes a plan at once) and the last (which does it when asked)."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_batch: int = 8,
        max_batch_tokens: int = 64,
        num_stages: int = 1,
        policy: str = "fcfs",
        num_host_blocks: int = 0,
        kv_policy: str = "recompute",
        salt: bytes | None = None,
        cost: CostModel | None = None,
    ):
        self.scheduler = Scheduler(
            POLICIES[policy](),
            KvManager(num_blocks, block_size, num_host_blocks, policy=KV_POLICIES[kv_policy], salt=salt),
            max_batch=max_batch,
            max_batch_tokens=max_batch_tokens,
            num_stages=num_stages,
            cost=cost,
        )
        self.now = 0.0
        self._shares_prefixes = salt is not None
        self.requests: dict[int, Request] = {}
        self.outputs: dict[int, list[int]] = {}
        self.reasons: dict[int, FinishReason] = {}
        self.aborted: set[int] = set()
        self.plans: list[IterationPlan] = []
        self.preempted_in_flight = 0
        self.first = FakeWorker(block_size, num_blocks, has_result=False, copies_late=True)
        self.last = FakeWorker(block_size, num_blocks, copies_late=True)
        self._to_last: deque[IterationPlan] = deque()
        self._tables: dict[int, list[int]] = {}
        self._slots_in_use: dict[int, set[int]] = {}
        """By plan in flight."""

    def add(self, *requests: Request) -> None:
        for new in requests:
            self.scheduler.add(new, self.now)
            self.requests[new.request_id] = new
            self.outputs[new.request_id] = []
        self.check()

    def abort(self, request_id: int) -> None:
        self.scheduler.abort(request_id, self.now)
        self.aborted.add(request_id)
        self.check()

    def schedule(self) -> IterationPlan | None:
        self.now += 1.0
        order = list(self.scheduler.policy.ranked(self.now))
        preemptions = [sequence.num_preemptions for sequence in order]
        residents = {*self.scheduler.kv.residents()}
        plan = self.scheduler.schedule(self.now)
        self._check_priorities(order, plan, residents)
        if not self.scheduler.kv.policy.is_early and not self._shares_prefixes:
            self._check_victims(order, preemptions)
        if plan is None or not plan.slices:
            is_waiting = self._slots_in_use or self.scheduler.kv.copies_in_flight
            assert is_waiting or not self.scheduler.request_ids(), "nothing runs"
        if plan is not None:
            self._take(plan)
        self.check()
        return plan

    def land(self, change: Callable[[IterationResult], IterationResult] = lambda result: result) -> list[TokenDelta]:
        """The result of the oldest plan in flight comes in."""
        self._land_empty()
        plan = self._to_last.popleft()
        report = self.last.execute(plan)
        assert report.result is not None
        del self._slots_in_use[plan.plan_id]
        deltas = self.scheduler.update(change(report.result), self.now)
        for delta in deltas:
            self._note(delta)
        self.check()
        return deltas

    def _land_empty(self) -> None:
        """Workers answer plans without slices, too."""
        while self._to_last and not self._to_last[0].slices:
            report = self.last.execute(self._to_last.popleft())
            assert report.result is not None
            assert self.scheduler.update(report.result, self.now) == []

    def copy(self, count: int = 2**31, uploads_first: bool = True) -> None:
        """Both ranks do so many of their copies, and say so."""
        self._land_empty()
        for worker in (self.first, self.last):
            worker.do_copies(count, uploads_first)
        self.scheduler.acknowledge(min(worker.report().copies_done for worker in (self.first, self.last)))
        self.check()

    def run(self, max_plans: int = 100_000) -> None:
        """Until all is done; then nothing may be left anywhere."""
        for turn in range(max_plans):
            plan = self.schedule()
            if self.num_in_flight and (plan is None or self.num_in_flight == self.scheduler.num_stages):
                self.land()
                self.copy(turn % 4, turn % 8 > 3)
            elif plan is None and self.scheduler.kv.copies_in_flight:
                self.copy()
            elif plan is None:
                return self._check_end()
        raise AssertionError(f"not done after {max_plans} plans: {self.scheduler.request_ids()}")

    @property
    def oldest(self) -> IterationPlan:
        """The plan in flight whose result is next."""
        return next(plan for plan in self._to_last if plan.slices)

    @property
    def num_in_flight(self) -> int:
        return len(self._slots_in_use)

    def check(self) -> None:
        scheduler = self.scheduler
        scheduler.check(self.now)
        if isinstance(scheduler.policy, SkipJoin):
            scheduler.policy.check()
        assert scheduler.num_in_flight == self.num_in_flight
        assert scheduler.num_running + scheduler.num_waiting == len(scheduler.request_ids())
        assert set(scheduler.request_ids()) == self.requests.keys() - self.reasons.keys() - self.aborted

    def _take(self, plan: IterationPlan) -> None:
        assert plan.plan_id == len(self.plans) + 1
        self._check_limits(plan)
        used: set[int] = set()
        written: set[int] = set()
        busy: set[int] = set().union(*self._slots_in_use.values())
        for piece in plan.slices:
            table = [*self._tables.get(piece.request_id, ())][: piece.num_kept_blocks] + list(piece.new_slots)
            self._tables[piece.request_id] = table
            first = piece.start // self.scheduler.kv.block_size
            assert written.isdisjoint(table), "a plan writes a slot that another request of it uses"
            assert used.isdisjoint(table[first:]), "a request writes a slot that it shares"
            if piece.num_kept_blocks:
                assert busy.isdisjoint(piece.new_slots), "a slot is reused while a plan in flight uses it"
            written.update(table[first:])
            used.update(table)
        self.plans.append(plan)
        self._to_last.append(plan)
        if plan.slices:
            self._slots_in_use[plan.plan_id] = used
        self.first.execute(plan)

    def _check_priorities(self, order: list[Sequence], plan: IterationPlan | None, residents: set[int]) -> None:
        """Nobody takes the blocks or the place of one that is ahead of it. One that is parked has no place."""
        pieces = {piece.request_id: piece for piece in plan.slices} if plan else {}
        resident = {*self.scheduler.kv.residents()}
        num_ahead, all_fit = 0, True
        for sequence in order:
            piece = pieces.get(sequence.request_id)
            if piece is not None:
                assert num_ahead < self.scheduler.max_batch
                is_early = self.scheduler.kv.policy.is_early
                is_back = not piece.num_kept_blocks and (is_early or piece.request_id in residents)
                assert all_fit or not piece.new_slots or is_back
            num_ahead += piece is not None or (sequence.awaits_sample and sequence.request_id in resident)
            waits = sequence.awaits_sample or not self.scheduler.kv.policy.preempts or self._is_waiting(sequence)
            all_fit &= piece is not None or waits

    def _is_waiting(self, sequence: Sequence) -> bool:
        """For its upload, or for its prefix."""
        return sequence.request_id in self.scheduler.kv.residents() or bool(sequence.keys)

    def _check_victims(self, order: list[Sequence], preemptions: list[int]) -> None:
        """Those who were preempted are the last ones, and no more than needed."""
        running = [rank for rank, sequence in enumerate(order) if sequence.num_blocks]
        pairs = enumerate(zip(order, preemptions, strict=True))
        victims = [rank for rank, (sequence, before) in pairs if sequence.num_preemptions > before]
        assert not victims or not running or max(running) < min(victims)
        self.preempted_in_flight += any(order[v].last_plan_id in self._slots_in_use for v in victims)

    def _check_limits(self, plan: IterationPlan) -> None:
        scheduler = self.scheduler
        assert plan.num_tokens <= scheduler.max_batch_tokens
        assert len(plan.slices) <= scheduler.max_batch
        assert not self.aborted & {piece.request_id for piece in plan.slices}

    def _note(self, delta: TokenDelta) -> None:
        """Every request gets its own answer, in order, and one end."""
        request_id = delta.request_id
        assert request_id not in self.reasons.keys() | self.aborted
        self.outputs[request_id] += delta.token_ids
        expected = self.expected(request_id)
        assert tuple(self.outputs[request_id]) == expected[: len(self.outputs[request_id])]
        if delta.finish_reason is not None:
            self.reasons[request_id] = delta.finish_reason
            if delta.finish_reason != "error":
                assert len(self.outputs[request_id]) == len(expected)

    def expected(self, request_id: int) -> tuple[int, ...]:
        wanted = self.requests[request_id]
        return answer(wanted.prompt, wanted.sampling, wanted.choice)

    def _check_end(self) -> None:
        assert self.scheduler.is_idle
        assert self.reasons.keys() | self.aborted == self.requests.keys()
        self._land_empty()
        self.copy()
        assert self.scheduler.kv.num_used == self.scheduler.kv.num_host_used == 0
        assert self.first.request_ids == self.last.request_ids == []
