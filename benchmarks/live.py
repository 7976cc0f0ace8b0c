"""Two policies on a real server under a heavy-tailed load, in pairs: `fastserve-hpc bench` with servers of its own.

python benchmarks/live.py [--policy skip-join] [--pairs 3] [--load 0.8 1.0 1.2] [--requests 600] [--capacity RATE]
    [--docs docs/scheduling.md] [--figure docs/figures/live.png] [-- SERVE OPTIONS]

Lengths are lognormal: prompts of 8 to 512 tokens (median 30, sigma 1), answers of 4 to 256 (median 20, sigma 1.5);
arrivals are Poisson, other ones in each pair. Load 1 is what fcfs gets done of twice as many requests that all come at
once. Each pair has the same requests at the same times; what counts is the median of the pairs' ratios of mean seconds
per output token: at most 0.6 at loads of 1.0 and more, at most 1.05 below. With --docs the table takes the place of
the one between the two marks there. Ends with 1 if a line fails.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

BASE = "fcfs"
BEGIN, END = "<!-- live: begin -->", "<!-- live: end -->"
MAX_BUSY, MAX_CALM = 0.6, 1.05


@dataclass(frozen=True)
class Pair:
    """The same load under both policies."""

    load: float
    base: dict[str, Any]
    other: dict[str, Any]

    def ratio(self, which: str) -> float:
        return float(self.other["normalized_latency_s"][which] / self.base["normalized_latency_s"][which])


def lognormal(rng: Random, middle: float, sigma: float, low: int, high: int) -> int:
    return min(high, max(low, round(middle * math.exp(rng.gauss(0, sigma)))))


def write_trace(path: Path, requests: int) -> None:
    """Lengths alone; `bench` draws the times."""
    rng = Random("live")
    with path.open("w") as out:
        for _ in range(requests):
            prompt, output = lognormal(rng, 30, 1.0, 8, 512), lognormal(rng, 20, 1.5, 4, 256)
            out.write(json.dumps({"arrival_s": 0.0, "prompt_tokens": prompt, "output_tokens": output}) + "\n")


def bench(policy: str, args: argparse.Namespace, *options: str) -> dict[str, Any]:
    serve = ["--policy", policy, "--max-batch", str(args.max_batch), *args.serve_options]
    load = ["--trace", str(args.trace), *options]
    command = [sys.executable, "-m", "fastserve_hpc", "bench", "--serve", "--json", *load, "--", *serve]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def capacity(args: argparse.Namespace) -> float:
    result = bench(BASE, args, "--offline")
    return float(result["requests"] / result["wall_s"])


def measure(args: argparse.Namespace, rate: float) -> list[Pair]:
    pairs = []
    for load in args.load:
        for number in range(args.pairs):
            options = ("--requests", str(args.requests), "--rate", f"{load * rate:.3f}", "--seed", str(number))
            order = (BASE, args.policy) if number % 2 == 0 else (args.policy, BASE)
            found = {policy: bench(policy, args, *options) for policy in order}
            pairs.append(Pair(load, found[BASE], found[args.policy]))
            print(f"load {load:g}, pair {number + 1}: {pairs[-1].ratio('mean'):.2f}", file=sys.stderr, flush=True)
    return pairs


def table(pairs: Sequence[Pair], args: argparse.Namespace, rate: float) -> tuple[list[str], bool]:
    lines = [
        f"| load | {BASE}: mean / P99, ms | {args.policy}: mean / P99, ms | ratios of the means | median | of P99 | |",
        "|---" * 7 + "|",
    ]
    all_pass = True
    for load in args.load:
        ones = [pair for pair in pairs if pair.load == load]
        middle = median(pair.ratio("mean") for pair in ones)
        passed = middle <= (MAX_BUSY if load >= 1 else MAX_CALM)
        all_pass &= passed
        ratios = ", ".join(f"{pair.ratio('mean'):.2f}" for pair in ones)
        cells = " | ".join(_milliseconds([getattr(pair, which) for pair in ones]) for which in ("base", "other"))
        tail = median(pair.ratio("p99") for pair in ones)
        lines.append(
            f"| {load:g} | {cells} | {ratios} | {middle:.2f} | {tail:.2f} | {'pass' if passed else '**FAIL**'} |"
        )
    machines = [run["machine"] for pair in pairs for run in (pair.base, pair.other)]
    busy = sorted(machine["other_busy_cores"] for machine in machines)
    lines += [
        "",
        f"{args.requests} requests a run, at most {args.max_batch} at a time; load 1 is {rate:.2f} requests/s. "
        f"{machines[0]['cores']} cores, of which others kept {median(busy):.1f} busy (median; at most {busy[-1]:.1f}).",
    ]
    return lines, all_pass


def _milliseconds(runs: Sequence[dict[str, Any]]) -> str:
    middle = (1000 * median(run["normalized_latency_s"][which] for run in runs) for which in ("mean", "p99"))
    return " / ".join(f"{value:.0f}" for value in middle)


def draw(pairs: Sequence[Pair], policy: str, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, which in zip(figure.subplots(1, 2), ("mean", "p99"), strict=True):
        for name, part in ((BASE, "base"), (policy, "other")):
            loads = sorted({pair.load for pair in pairs})
            runs = [[getattr(p, part)["normalized_latency_s"][which] for p in pairs if p.load == x] for x in loads]
            axes.plot(loads, [median(values) for values in runs], marker="o", label=name)
        axes.set(xlabel="load", ylabel=f"{which} s/token", yscale="log")
        axes.grid(True, alpha=0.3)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(str(path), format="png", dpi=80)


def write(docs: Path, lines: Sequence[str], figure: Path | None) -> None:
    """Between the marks."""
    before, _, rest = docs.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    picture = [] if figure is None else ["", f"![seconds per token over load]({figure.relative_to(docs.parent)})"]
    docs.write_text(before + "\n".join([BEGIN, *lines, *picture, END]) + after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="skip-join")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--load", type=float, nargs="+", default=[0.8, 1.0, 1.2])
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--max-batch", type=int, default=16)
    parser.add_argument("--capacity", type=float, help="requests/s, instead of measuring it")
    parser.add_argument("--docs", type=Path)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("serve_options", nargs="*")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        args.trace = Path(directory) / "trace.jsonl"
        write_trace(args.trace, 2 * args.requests)
        rate = args.capacity or capacity(args)
        pairs = measure(args, rate)
    lines, passed = table(pairs, args, rate)
    print("\n".join(lines))
    if args.figure is not None:
        draw(pairs, args.policy, args.figure)
    if args.docs is not None:
        write(args.docs, lines, args.figure)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
