"""The loop of a rank: plans in order, reports, idling, the end."""

from __future__ import annotations

from collections import deque

import pytest

from fastserve_hpc.core.plan import IterationPlan, RankReport
from fastserve_hpc.worker import loop


class Scripted:
    """Executor, plan channel, pause and clock in one; every call is noted."""

    def __init__(self, plans: list[IterationPlan | None], copies_done: dict[int, int] | None = None):
        self._plans = deque(plans)
        self._copies_done = copies_done or {}
        self.calls: list[str] = []
        self.reports: list[RankReport] = []
        self.num_pauses = 0
        self._plan_id = 0

    def next_plan(self) -> IterationPlan | None:
        return self._plans.popleft()

    def execute(self, plan: IterationPlan) -> RankReport:
        self.calls.append(f"execute {plan.plan_id}")
        self._plan_id = plan.plan_id
        return self._state()

    def clock(self) -> float:
        return self.num_pauses * 0.25

    def pause(self) -> None:
        self.num_pauses += 1

    def reset(self) -> None:
        self.calls.append("reset")

    def _state(self) -> RankReport:
        done = max((n for at, n in self._copies_done.items() if at <= self.num_pauses), default=0)
        return RankReport(3, self._plan_id, done, free_bytes=1)


class Worker:
    def __init__(self, script: Scripted):
        self._script = script

    def execute(self, plan: IterationPlan) -> RankReport:
        return self._script.execute(plan)

    def report(self) -> RankReport:
        return self._script._state()


class Control:
    def __init__(self, script: Scripted):
        self._script = script

    def next_plan(self) -> IterationPlan | None:
        return self._script.next_plan()

    def report(self, report: RankReport) -> None:
        self._script.reports.append(report)


def run(script: Scripted, check: object = None) -> None:
    loop.run(Worker(script), Control(script), script, check or (lambda: None), clock=script.clock)  # type: ignore[arg-type]


def test_plans_are_executed_and_reported_until_shutdown() -> None:
    script = Scripted([IterationPlan(1), None, IterationPlan(2), IterationPlan(3, shutdown=True), IterationPlan(4)])
    run(script)
    assert script.calls == ["execute 1", "reset", "execute 2", "reset", "execute 3"]
    assert [report.plan_id for report in script.reports] == [1, 2, 3]
    assert script.num_pauses == 1


def test_idle_rank_reports_its_memory_seldom() -> None:
    script = Scripted([None] * 40 + [IterationPlan(1, shutdown=True)])
    run(script)
    assert script.num_pauses == 40  # 10 s of the scripted clock
    assert 9 <= len(script.reports) - 1 <= 10


def test_copies_that_get_done_while_idle_are_reported_at_once() -> None:
    script = Scripted(
        [IterationPlan(1), None, None, None, IterationPlan(2, shutdown=True)], copies_done={0: 1, 1: 2, 2: 5}
    )
    run(script)
    assert [report.copies_done for report in script.reports] == [1, 2, 5, 5]


def test_abort_ends_the_loop_even_when_idle() -> None:
    class Aborted(Exception):
        pass

    script = Scripted([None] * 5)

    def check() -> None:
        if script.num_pauses == 3:
            raise Aborted

    with pytest.raises(Aborted):
        run(script, check)
    assert script.num_pauses == 3
