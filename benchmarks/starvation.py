"""A long answer under an endless stream of short ones: how much longer it takes than in order of arrival. Simulated.

python benchmarks/starvation.py [--batch 16 64] [--load 1.2] [--requests 12000]

Prints a table, a line for each stream and batch limit, and ends with 1 if a line fails: a request of 4,000 tokens may
take 1.5 times as long as under fcfs in the same stream.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from workloads import Site, costs_of, verdict

from fastserve_hpc.sim.lengths import QuantileLengths
from fastserve_hpc.sim.workload import Arrival, DrawnSource

STREAMS = ((5, 60), (20, 200), (64, 64))
"""Shortest and longest answer."""
LONG, MAX_RATIO = 4000, 1.5
_BEFORE = 0.02
"""The part of the stream that comes before the long request."""


def arrivals(place: Site, load: float, seed: int) -> tuple[list[Arrival], int]:
    """A stream with one long request early on, and the number of that."""
    stream = place.arrivals(load, seed)
    number = max(1, int(len(stream) * _BEFORE))
    return [*stream[:number], replace(stream[number], output_tokens=LONG), *stream[number:]], number


def times(place: Site, load: float, seed: int = 0) -> tuple[float, float, bool]:
    """Seconds that the long request takes under fcfs and under skip-join, and whether the stream outlasts it."""
    stream, number = arrivals(place, load, seed)
    fcfs, ours = (place.finished(policy, stream)[number] for policy in ("fcfs", "skip-join"))
    took = [done.finish_s - done.arrival.arrival_s for done in (fcfs, ours)]
    return took[0], took[1], stream[-1].arrival_s >= ours.finish_s


def place_of(shortest: int, longest: int, batch: int, requests: int) -> Site:
    source = DrawnSource(QuantileLengths((10, 200), (shortest, longest)))
    return Site(source, batch, requests, costs_of())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--load", type=float, default=1.2)
    parser.add_argument("--requests", type=int, default=12_000)
    args = parser.parse_args()
    print("| answers of the stream | batch | fcfs, s | skip-join, s | ratio | the stream goes on | |")
    print("|---" * 7 + "|")
    failed = 0
    for shortest, longest in STREAMS:
        for batch in args.batch:
            fcfs_s, ours_s, goes_on = times(place_of(shortest, longest, batch, args.requests), args.load)
            passed = ours_s <= MAX_RATIO * fcfs_s
            failed += not passed
            cells = f"{fcfs_s:.0f} | {ours_s:.0f} | {ours_s / fcfs_s:.2f} | {'yes' if goes_on else 'no'}"
            print(f"| {shortest}-{longest} | {batch} | {cells} | {verdict(passed)} |", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
