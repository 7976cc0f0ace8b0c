"""What `batch_beside.py` measures, under the server's scheduler with a virtual clock: the same on every machine.

python benchmarks/batch_beside_simulated.py --trace lengths.jsonl [--requests 1000] [--policy skip-join]

Costs are of a 135M model on two cores. The batch has 128 lines in flight all the time, as an attached run keeps them.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from dataclasses import replace
from pathlib import Path

from fastserve_hpc.core.cost import CostModel, Costs
from fastserve_hpc.core.plan import TokenDelta
from fastserve_hpc.core.policy import make_policy
from fastserve_hpc.core.policy.by_class import ByClass
from fastserve_hpc.core.request import Request, SamplingParams
from fastserve_hpc.sim.engine import EngineSettings, SimulatedEngine
from fastserve_hpc.sim.workload import Arrival
from fastserve_hpc.stats import percentile

COSTS = Costs(fixed_s=12e-3, prefill_token_s=4e-4, decode_sequence_s=8e-4)
IN_FLIGHT = 128
FIRST_BATCH_ID = 10**9


class Engine(SimulatedEngine):
    """A simulated server with a batch that sends a new line for each that ends."""

    def __init__(self, policy: str, lengths: list[tuple[int, int]], slowdown: float | None) -> None:
        settings = EngineSettings(costs=COSTS, kv_tokens=200_000, max_batch=64, max_batch_tokens=512)
        cost = CostModel(COSTS)
        super().__init__(settings, ByClass(lambda: make_policy(policy, max_batch=settings.max_batch, cost=cost)))
        self.batch_tokens = 0
        self._slowdown = slowdown
        self._lines = iter(range(FIRST_BATCH_ID, 2 * FIRST_BATCH_ID))
        self._lengths, self._rng = lengths, random.Random(5)
        for _ in range(IN_FLIGHT * (slowdown is not None)):
            self._send_line()

    def _send_line(self) -> None:
        num_prompt, num_output = self._rng.choice(self._lengths)
        sampling = SamplingParams(max_tokens=num_output, temperature=0.0, seed=0)
        request = Request(next(self._lines), (0,) * num_prompt, sampling, service_class="batch")
        self.scheduler.add(replace(request, slowdown=self._slowdown), self.now)

    def _note(self, delta: TokenDelta, now: float) -> None:
        if delta.request_id < FIRST_BATCH_ID:
            super()._note(delta, now)
            return
        self.batch_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._send_line()


def capacity(policy: str, lengths: list[tuple[int, int]]) -> float:
    """Batch tokens a second with nobody else."""
    engine = Engine(policy, lengths, math.inf)
    engine.run([Arrival(600.0, 1, 1)])
    return engine.batch_tokens / engine.now


def interactive(policy: str, lengths: list[tuple[int, int]], count: int, rate: float, slowdown: float | None) -> Engine:
    rng, now, arrivals = random.Random(1), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        arrivals.append(Arrival(now, *rng.choice(lengths)))
    engine = Engine(policy, lengths, slowdown)
    engine.run(arrivals)
    return engine


def p95(engine: Engine) -> tuple[float, float]:
    """TTFT, and seconds per token from arrival to end."""
    done = engine.finished.values()
    ttft_s = percentile(sorted(finished.ttft_s for finished in done), 95) or 0.0
    return ttft_s, percentile(sorted(finished.normalized_latency_s for finished in done), 95) or 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--load", type=float, default=0.3)
    parser.add_argument("--scale", type=float, default=0.125)
    parser.add_argument("--policy", default="skip-join")
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.trace.read_text().splitlines()[:4000]]
    lengths = [(round(r["prompt_tokens"] * args.scale) or 1, round(r["output_tokens"] * args.scale) or 1) for r in rows]
    tokens_per_s = capacity(args.policy, lengths)
    rate = args.load * tokens_per_s * len(lengths) / sum(output for _, output in lengths)
    alone = p95(interactive(args.policy, lengths, args.requests, rate, None))
    print(f"capacity {tokens_per_s:.0f} tokens/s; alone: TTFT p95 {alone[0]:.3f} s, {alone[1]:.4f} s per token")
    print("| S | TTFT, p95 | s per token, p95 | batch tokens/s | of what is left |\n|---|---|---|---|---|")
    for slowdown in (1.1, 1.25, 1.5, 2.0, 3.0, 4.0, math.inf):
        engine = interactive(args.policy, lengths, args.requests, rate, slowdown)
        ttft, token = (found / base for found, base in zip(p95(engine), alone, strict=True))
        batch = engine.batch_tokens / engine.now
        part = batch / tokens_per_s / (1 - args.load)
        print(f"| {slowdown:g} | {ttft:.2f} | {token:.2f} | {batch:.0f} | {part:.0%} |", flush=True)


if __name__ == "__main__":
    main()
