"""Skip-join and its ablations against fcfs, simulated: ratios of seconds per output token.

python benchmarks/policies.py --trace conv.jsonl --trace long.jsonl:8 --lengths sharegpt
    [--batch 16 64] [--load 0.9 1.2] [--seeds 4] [--requests 1200] [--variants ours paper no-aging ...]

A number after a trace's name divides its prompt lengths. A line is a workload, batch limit and load; for each variant
it has the ratio of means, the ratio of 99th percentiles, and the largest ratio of means of a single seed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from statistics import fmean

from fastserve_hpc.core.cost import CostModel
from fastserve_hpc.core.policy import Policy, make_policy
from fastserve_hpc.core.policy.sizing import SkipJoinRules
from fastserve_hpc.core.policy.skip_join import SkipJoin
from fastserve_hpc.sim.engine import EngineSettings, SimulatedEngine
from fastserve_hpc.sim.hardware import HARDWARE
from fastserve_hpc.sim.lengths import find_lengths
from fastserve_hpc.sim.shapes import SHAPES
from fastserve_hpc.sim.study import Study
from fastserve_hpc.sim.workload import Arrival, DrawnSource, Source, TraceSource, read_trace
from fastserve_hpc.stats import summarise

AMPLE = 16_000_000

RULES: Mapping[str, SkipJoinRules] = {
    "ours": SkipJoinRules(),
    "no-join": SkipJoinRules(joins_by_prompt=False),
    "no-sink": SkipJoinRules(sinks_prompt=False),
    "no-replace": SkipJoinRules(replaces=False),
    "no-spared": SkipJoinRules(spared_levels=-math.inf),
    "no-finishing": SkipJoinRules(spares_finishing=False),
    "no-aging": SkipJoinRules(aging=math.inf),
    "no-oldest": SkipJoinRules(oldest_share=0.0),
}
OTHERS: Mapping[str, str] = {"paper": "skip-join-paper", "mlfq": "mlfq", "srpt": "srpt", "oracle": "oracle"}


def policy_of(name: str, settings: EngineSettings) -> Policy:
    cost = CostModel(settings.costs)
    if name in RULES:
        return SkipJoin(settings.max_batch, cost, RULES[name])
    return make_policy(OTHERS.get(name, name), max_batch=settings.max_batch, cost=cost)


def sources(traces: list[str], lengths: list[str]) -> Iterator[tuple[str, Source]]:
    for text in traces:
        name, _, divisor = text.partition(":")
        yield Path(name).stem, TraceSource(read_trace(Path(name), 1 / float(divisor or 1)))
    for name in lengths:
        yield Path(name).stem, DrawnSource(find_lengths(name))


def latencies(name: str, settings: EngineSettings, arrivals: list[Arrival]) -> tuple[float, float]:
    """Mean and 99th percentile."""
    engine = SimulatedEngine(settings, policy_of(name, settings))
    engine.run(arrivals)
    summary = summarise([done.normalized_latency_s for done in engine.finished.values()])
    return summary["mean"] or 0.0, summary["p99"] or 0.0


def ratios(ours: list[tuple[float, float]], fcfs: list[tuple[float, float]]) -> str:
    mean, p99 = (fmean(one[i] for one in ours) / fmean(one[i] for one in fcfs) for i in (0, 1))
    worst = max(one[0] / base[0] for one, base in zip(ours, fcfs, strict=True))
    return f"{mean:.3f} / {p99:.3f} / {worst:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", action="append", default=[], metavar="FILE[:N]")
    parser.add_argument("--lengths", action="append", default=[])
    parser.add_argument("--hardware", choices=list(HARDWARE), default="a100-80g")
    parser.add_argument("--model", choices=list(SHAPES), default="llama-3-8b")
    parser.add_argument("--batch", type=int, nargs="+", default=[16])
    parser.add_argument("--load", type=float, nargs="+", default=[0.9, 1.2])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=1200)
    parser.add_argument("--variants", nargs="+", choices=[*RULES, *OTHERS], default=["ours", "paper"])
    args = parser.parse_args()
    print("| workload | batch | load | fcfs mean / P99, s | " + " | ".join(args.variants) + " |")
    print("|---" * (4 + len(args.variants)) + "|")
    costs = HARDWARE[args.hardware].costs(SHAPES[args.model])
    for name, source in sources(args.trace, args.lengths):
        for batch in args.batch:
            settings = EngineSettings(costs=costs, kv_tokens=AMPLE, max_batch=batch, max_batch_tokens=2048)
            study = Study(settings=settings, source=source, num_requests=args.requests, policies=("fcfs",))
            capacity = study.capacity()
            for load in args.load:
                print(_line(name, source, settings, load, capacity, args), flush=True)


def _line(
    name: str, source: Source, settings: EngineSettings, load: float, capacity: float, args: argparse.Namespace
) -> str:
    workloads = [source.draw(args.requests, load * capacity, Random(f"workload {i}")) for i in range(args.seeds)]
    run: Callable[[str], list[tuple[float, float]]] = lambda policy: [  # noqa: E731
        latencies(policy, settings, arrivals) for arrivals in workloads
    ]
    fcfs = run("fcfs")
    base = " / ".join(f"{fmean(one[i] for one in fcfs):.4f}" for i in (0, 1))
    cells = [ratios(run(variant), fcfs) for variant in args.variants]
    return f"| {name} | {settings.max_batch} | {load:g} | {base} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
