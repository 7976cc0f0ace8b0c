"""What clients' hints of their answers' lengths bring, and that wrong ones do no harm. Simulated.

python benchmarks/hints.py [--traces DIR] [--workload azure ...] [--batch 16] [--load 0.9 1.2] [--seeds 1]

Prints a table, a line for each workload, batch limit and load, and ends with 1 if one fails. Exact hints: mean at most
1.25 x that of `srpt`, never above 1.02 x that without hints, and the geometric mean over all lines at most 0.95 x
that of `srpt`. Off by up to 50 %, always 4 times too small, wrong by 4 either way, another request's: mean at most
1.05 x and 99th percentile at most 1.10 x those without hints.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from statistics import geometric_mean

from workloads import TITLES, Ratios, Site, add_options, ratios, site, verdict

WRONG = ("noisy:0.5", "scaled:0.25", "wrong:4", "shuffled")
MAX_TO_SRPT, MAX_MEAN_TO_SRPT, MAX_TO_UNHINTED = 1.25, 0.95, 1.02
MAX_WRONG_MEAN, MAX_WRONG_P99 = 1.05, 1.10


def compare(place: Site, load: float, seeds: int, wrong: Sequence[str] = WRONG) -> tuple[Ratios, Ratios, list[Ratios]]:
    """Exact hints to `srpt` and to none; each kind of wrong ones to none."""
    plain = [place.run("skip-join", place.arrivals(load, seed)) for seed in range(seeds)]
    best = [place.run("srpt", place.arrivals(load, seed)) for seed in range(seeds)]
    hinted = [
        [place.run("skip-join", place.arrivals(load, seed, kind)) for seed in range(seeds)]
        for kind in ("exact", *wrong)
    ]
    exact, *others = hinted
    return ratios(exact, best), ratios(exact, plain), [ratios(other, plain) for other in others]


def passes(to_srpt: Ratios, to_plain: Ratios, wrong: Sequence[Ratios]) -> bool:
    is_good = to_srpt.mean <= MAX_TO_SRPT and to_plain.mean <= MAX_TO_UNHINTED
    return is_good and all(found.mean <= MAX_WRONG_MEAN and found.p99 <= MAX_WRONG_P99 for found in wrong)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, seeds=1)
    parser.add_argument("--batch", type=int, nargs="+", default=[16])
    parser.add_argument("--load", type=float, nargs="+", default=[0.9, 1.2])
    args = parser.parse_args()
    print("| workload | batch | load | exact to srpt | exact | " + " | ".join(WRONG) + " | |")
    print("|---" * (6 + len(WRONG)) + "|")
    failed, to_srpt = 0, []
    for workload in args.workload:
        for batch in args.batch:
            place = site(workload, args.traces, batch, args.requests)
            for load in args.load:
                found = compare(place, load, args.seeds)
                passed = passes(*found)
                failed += not passed
                to_srpt.append(found[0].mean)
                cells = " | ".join(f"{one.mean:.2f} / {one.p99:.2f}" for one in (found[1], *found[2]))
                line = (
                    f"| {TITLES[workload]} | {batch} | {load:g} | {found[0].mean:.2f} | {cells} | {verdict(passed)} |"
                )
                print(line, flush=True)
    mean = geometric_mean(to_srpt)
    failed += mean > MAX_MEAN_TO_SRPT
    print(f"\nGeometric mean of exact to srpt: {mean:.2f}, {verdict(mean <= MAX_MEAN_TO_SRPT)}.")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
