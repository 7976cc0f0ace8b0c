"""Sums among the ranks of a node through shared memory: `python benchmarks/collectives.py --ranks 3 --bytes 4096`.

Medians in microseconds of a call, of the rank that takes longest, over several rounds. Ranks may be more than cores.
Needs the repository on PYTHONPATH (. and kernels).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from fastserve_kernels import open_kernels
from fastserve_kernels.shared import SharedGroup, create_segment

CALLS = 400


def one_rank(results: Any, rank: int, path: Path, options: argparse.Namespace) -> None:
    """Puts the median of each round."""
    torch.set_num_threads(1)
    crowded = options.ranks > len(os.sched_getaffinity(0))
    kernels, group = open_kernels(num_threads=1), SharedGroup(path, rank, options.ranks, is_crowded=crowded)
    x, medians = torch.zeros(options.bytes // 4), []
    for _ in range(options.rounds):
        times = []
        for _ in range(CALLS):
            began = time.perf_counter()
            kernels.all_reduce(x, group)
            times.append(time.perf_counter() - began)
        medians.append(statistics.median(times) * 1e6)
    results.put(medians)


def measure(options: argparse.Namespace) -> list[float]:
    """The median of each round, of the rank that waited longest."""
    path = create_segment(options.ranks)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=one_rank, args=(results, r, path, options)) for r in range(options.ranks)]
    try:
        for rank in ranks:
            rank.start()
        medians = [results.get(timeout=120) for _ in ranks]
    finally:
        for rank in ranks:
            rank.kill()
        path.unlink()
    return [max(of_one_round) for of_one_round in zip(*medians, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--bytes", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rounds = measure(options)
    report = {
        "ranks": options.ranks,
        "cores": len(os.sched_getaffinity(0)),
        "bytes": options.bytes,
        "median_us": statistics.median(rounds),
        "best_round_us": min(rounds),
        "load_average": os.getloadavg()[0],
    }
    if options.json:
        print(json.dumps(report))
        return
    print(
        f"all-reduce of {options.bytes} bytes among {options.ranks} ranks on {report['cores']} cores: "
        f"median {report['median_us']:.0f} us, best of {len(rounds)} rounds {report['best_round_us']:.0f} us "
        f"(load average {report['load_average']:.1f})"
    )


if __name__ == "__main__":
    main()
