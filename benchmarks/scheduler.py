"""What scheduling costs: microseconds of processor time for one `schedule` + `update`, by the queue's length.

python benchmarks/scheduler.py [--policy fcfs skip-join] [--batch 256] [--queued 100 20000] [--json]

Ends with 1 if skip-join with a batch of 256 and blocks for all takes more than 500 us with 100 queued, or more than 1.3
times that with the longest queue.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

from fastserve_hpc.core.cost import CostModel
from fastserve_hpc.core.kv_manager import KvManager
from fastserve_hpc.core.plan import IterationResult
from fastserve_hpc.core.policy import POLICIES, make_policy
from fastserve_hpc.core.request import Request, SamplingParams
from fastserve_hpc.core.scheduler import Scheduler

PROMPT_TOKENS = 64
MAX_TOKENS = 4096
BLOCK_SIZE = 16
MAX_US, MAX_GROWTH = 500.0, 1.3


def scheduler_with(policy: str, batch: int, queued: int, num_stages: int, blocks_are_short: bool) -> Scheduler:
    """A scheduler whose batch is full and decodes, with so many requests that wait for a place or for blocks."""
    blocks = batch * (PROMPT_TOKENS + MAX_TOKENS) // BLOCK_SIZE
    max_batch = 2 * batch if blocks_are_short else batch
    if blocks_are_short:
        blocks = batch * (PROMPT_TOKENS // BLOCK_SIZE + 1) + MAX_TOKENS // BLOCK_SIZE
    cost = CostModel()
    scheduler = Scheduler(
        make_policy(policy, max_batch=max_batch, cost=cost),
        KvManager(blocks, BLOCK_SIZE),
        max_batch=max_batch,
        max_batch_tokens=batch * PROMPT_TOKENS,
        num_stages=num_stages,
        cost=cost,
    )
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, seed=0, stop_token_ids=(2,))
    for i in range(batch + queued):
        scheduler.add(Request(i, (1,) * PROMPT_TOKENS, sampling), 0.0)
    return scheduler


def iterations(scheduler: Scheduler, count: int) -> list[float]:
    """Processor seconds that each of the iterations takes to schedule and to update."""
    times = []
    for i in range(count):
        begin = time.thread_time()
        plan = scheduler.schedule(float(i))
        assert plan is not None
        scheduled = time.thread_time()
        token_ids = (7,) * sum(piece.samples for piece in plan.slices)
        result = IterationResult(plan.plan_id, token_ids, compute_s=0.02)
        received = time.thread_time()
        scheduler.update(result, float(i))
        times.append(scheduled - begin + time.thread_time() - received)
    return times


def measure(policy: str, batch: int, queued: int, blocks_are_short: bool = False) -> dict[str, float | str]:
    scheduler = scheduler_with(policy, batch, queued, 1, blocks_are_short)
    iterations(scheduler, 5)
    times = iterations(scheduler, 300)
    return {
        "policy": policy,
        "batch": batch,
        "queued": queued,
        "running": scheduler.num_running,
        "median_us": statistics.median(times) * 1e6,
        "mean_us": statistics.fmean(times) * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", nargs="+", choices=list(POLICIES), default=["fcfs", "skip-join"])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--queued", type=int, nargs="+", default=[100, 20000])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    points = [
        {"blocks": blocks, **measure(policy, args.batch, queued, blocks == "short")}
        for policy in args.policy
        for blocks in ("ample", "short")
        for queued in args.queued
    ]
    if args.json:
        print(json.dumps({"points": points}))
        return
    _print(points)
    sys.exit(0 if passes(points) else 1)


def passes(points: list[dict[str, float | str]]) -> bool:
    """Of the default policy, with memory for all."""
    medians = [float(p["median_us"]) for p in points if (p["policy"], p["blocks"]) == ("skip-join", "ample")]
    return not medians or (medians[0] <= MAX_US and medians[-1] <= MAX_GROWTH * medians[0])


def _print(points: list[dict[str, float | str]]) -> None:
    for point in points:
        print(
            f"{point['policy']}, batch {point['batch']}, {point['queued']:>6} queued, blocks {point['blocks']}: "
            f"median {point['median_us']:.0f} us, mean {point['mean_us']:.0f} us, {point['running']} running"
        )


if __name__ == "__main__":
    main()
