"""`fastserve-hpc` with one rank, named by RAISING_RANK, whose worker raises at its third plan."""

from __future__ import annotations

import os

from fastserve_hpc.cli import main
from fastserve_hpc.core.plan import IterationPlan, RankReport
from fastserve_hpc.worker.fake import FakeWorker

execute = FakeWorker.execute


def execute_or_raise(self: FakeWorker, plan: IterationPlan) -> RankReport:
    if plan.plan_id == 3 and os.environ["PMI_RANK"] == os.environ["RAISING_RANK"]:
        raise RuntimeError("the sky is falling")
    return execute(self, plan)


FakeWorker.execute = execute_or_raise  # type: ignore[method-assign]
main()
