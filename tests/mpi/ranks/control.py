"""1,000 plans to every rank, every one reported back, in order: `control.py NUM_PLANS`."""

import random
import sys

from fastserve_hpc.core.plan import IterationPlan, IterationResult, NewRequest, RankReport, SequenceSlice
from fastserve_hpc.core.request import SamplingParams
from fastserve_hpc.parallel.idle import Backoff
from fastserve_hpc.parallel.mpi_control import MpiControl, MpiWorkerControl
from fastserve_hpc.parallel.mpi_init import finalize_mpi, init_mpi

NUM_PLANS = int(sys.argv[1])


def make_plan(plan_id: int) -> IterationPlan:
    """Mostly small; now and then with a prompt of 300 KB, far over any eager limit."""
    draw = random.Random(plan_id)
    prompt = tuple(draw.randrange(50_000) for _ in range(100_000 if plan_id % 97 == 0 else draw.randrange(20)))
    sampling = SamplingParams(seed=plan_id, logit_bias={plan_id: 1.5}, stop=("a",), stop_token_ids=(2,))
    new = NewRequest(plan_id, prompt, sampling, choice=0)
    slices = tuple(SequenceSlice(i, 3, 1, 1, (i,), (plan_id,), True) for i in range(plan_id % 64))
    return IterationPlan(plan_id, slices, (new,), (plan_id - 1,), shutdown=plan_id == NUM_PLANS)


def coordinate(control: MpiControl, num_workers: int) -> None:
    last = dict.fromkeys(range(1, num_workers + 1), 0)
    backoff = Backoff()
    published = 0
    while min(last.values()) < NUM_PLANS:
        if published < NUM_PLANS and published - min(last.values()) < 4:
            published += 1
            control.publish(make_plan(published))
        reports = control.collect()
        for report in reports:
            assert report.plan_id == last[report.rank] + 1
            assert report.result == IterationResult(report.plan_id, (report.rank, 7), (None, None))
            last[report.rank] = report.plan_id
        backoff.reset() if reports else backoff.pause()
    assert control.collect() == []


def work(control: MpiWorkerControl, rank: int) -> None:
    backoff = Backoff()
    plan_id = 0
    while plan_id < NUM_PLANS:
        plan = control.next_plan()
        if plan is None:
            backoff.pause()
            continue
        backoff.reset()
        plan_id += 1
        assert plan == make_plan(plan_id)
        assert plan.shutdown == (plan_id == NUM_PLANS)
        control.report(RankReport(rank, plan_id, 0, 1 << 40, IterationResult(plan_id, (rank, 7), (None, None))))
    assert control.next_plan() is None


world = init_mpi()
if world.rank == 0:
    coordinator_side = MpiControl(world)
    coordinate(coordinator_side, world.size - 1)
    coordinator_side.close()
    print(f"plans={NUM_PLANS}")
else:
    worker_side = MpiWorkerControl(world)
    work(worker_side, world.rank)
    worker_side.close()
finalize_mpi(world)
