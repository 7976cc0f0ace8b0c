"""The life of a rank other than 0: take a plan, execute it, report."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from fastserve_hpc.core.plan import IterationPlan, RankReport

IDLE_REPORT_S = 1.0
"""How often an idle rank tells its memory."""


class Executor(Protocol):
    """A `Worker` or a `FakeWorker`."""

    def execute(self, plan: IterationPlan) -> RankReport: ...

    def report(self) -> RankReport: ...


class PlanChannel(Protocol):
    """The worker's side of the control plane (`parallel.control.WorkerControl`)."""

    def next_plan(self) -> IterationPlan | None: ...

    def report(self, report: RankReport) -> None: ...


class Backoff(Protocol):
    """Pauses that grow until there was work (`parallel.idle.Backoff`)."""

    def pause(self) -> None: ...

    def reset(self) -> None: ...


def run(
    worker: Executor,
    control: PlanChannel,
    backoff: Backoff,
    check: Callable[[], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Execute plans until one says `shutdown`; `check` raises where the run is to be aborted.

    While idle, copies that get done are reported at once, memory every `IDLE_REPORT_S`.
    """
    last, reported_at = worker.report(), clock()
    while True:
        check()
        plan = control.next_plan()
        if plan is not None:
            last, reported_at = worker.execute(plan), clock()
            control.report(last)
            if plan.shutdown:
                return
            backoff.reset()
            continue
        idle = worker.report()
        if idle.copies_done > last.copies_done or clock() - reported_at >= IDLE_REPORT_S:
            control.report(idle)
            last, reported_at = idle, clock()
        backoff.pause()
