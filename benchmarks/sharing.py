"""What service classes and sessions bring to those who share a server with heavy users. Simulated.

python benchmarks/sharing.py [--batch 16] [--seeds 4] [--requests 800]

First-turn ShareGPT lengths. Light users send single requests at half of the capacity. Beside them there is, in the
first table, work of class `batch`, as much as the light users' and all at once; in the second, one session that sends
40 requests at once again and again, as much in all. Mean and 99th percentile of seconds per output token of the light
users and of the heavy one, with the rule and without it, and under fcfs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from workloads import Latency, Site, site

from fastserve_hpc.core.policy.sizing import SkipJoinRules
from fastserve_hpc.sim.workload import Arrival
from fastserve_hpc.stats import summarise

LOAD = 0.5
BURST = 40


def with_batch(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """Every other request is of class `batch` and there from the beginning."""
    heavy = [replace(one, arrival_s=0.0, service_class="batch") for one in arrivals[1::2]]
    return sorted([*arrivals[::2], *heavy], key=lambda one: one.arrival_s)


def with_session(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """Every other request is of one session and comes with the others of its burst."""
    heavy = arrivals[1::2]
    starts = [heavy[i - i % BURST].arrival_s for i in range(len(heavy))]
    moved = [replace(one, arrival_s=start, session="agent") for one, start in zip(heavy, starts, strict=True)]
    return sorted([*arrivals[::2], *moved], key=lambda one: one.arrival_s)


def is_heavy(arrival: Arrival) -> bool:
    return arrival.session is not None or arrival.service_class == "batch"


def latency(place: Site, policy: str | SkipJoinRules, streams: Sequence[list[Arrival]], heavy: bool) -> Latency:
    """Over all streams, of the heavy users' requests or of the others."""
    found = [one for stream in streams for one in place.finished(policy, stream) if is_heavy(one.arrival) == heavy]
    summary = summarise([one.normalized_latency_s for one in found])
    return Latency(summary["mean"] or 0.0, summary["p99"] or 0.0)


def table(place: Site, streams: Sequence[list[Arrival]], rule: str) -> None:
    print(f"| | light users: mean / P99, s | `{rule}`: mean / P99, s |\n|---|---|---|")
    policies = {"with the rule": SkipJoinRules(), "without": SkipJoinRules().without([rule]), "fcfs": "fcfs"}
    for name, policy in policies.items():
        cells = (latency(place, policy, streams, heavy) for heavy in (False, True))
        print(f"| {name} | " + " | ".join(f"{one.mean:.4f} / {one.p99:.4f}" for one in cells) + " |", flush=True)
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=800)
    args = parser.parse_args()
    place = site("sharegpt", Path(), args.batch, args.requests)
    plain = [place.arrivals(2 * LOAD, seed) for seed in range(args.seeds)]
    table(place, [with_batch(arrivals) for arrivals in plain], "classes")
    table(place, [with_session(arrivals) for arrivals in plain], "sessions")


if __name__ == "__main__":
    main()
