"""Interactive requests beside a batch file: what they lose, and what the batch gets, for several bounds S.

python benchmarks/batch_beside.py --trace lengths.jsonl [--requests 300] [--slowdown 1.25 --slowdown 2 --slowdown 4]

First the capacity: batch lines alone, for a while. Then Poisson requests at 30 % of it (`--load`) without a batch, and
with one that never ends, for each S: the same requests at the same times. Ratios are to the run without.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batch_engine import Ask, asks, status
from serving import PROGRAM, RunningServer

from fastserve_hpc.bench.load import Outcome, Run, report, run_load
from fastserve_hpc.bench.trace import Load
from fastserve_hpc.client import AsyncClient

METRICS = ("ttft_s", "normalized_latency_s")


@dataclass(slots=True)
class Batch:
    """`fastserve-hpc batch` in the background, with more lines than it will ever do."""

    process: subprocess.Popen[bytes]
    output: Path

    @classmethod
    def start(cls, server: RunningServer, source: Path, output: Path, slowdown: float) -> Batch:
        command = [*PROGRAM, "batch", "--endpoint", server.endpoint, "--input", str(source), "--output", str(output)]
        command += ["--batch-slowdown", str(slowdown), "--in-flight", "128"]
        return cls(subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL), output)

    def num_done(self) -> int:
        return self.output.read_bytes().count(b"\n") if self.output.exists() else 0

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)


def capacity(server: RunningServer, source: Path, directory: Path, seconds: float) -> float:
    """Output tokens a second of a batch that has the server to itself."""
    batch = Batch.start(server, source, directory / "capacity.jsonl", 1000.0)
    while not batch.num_done():
        time.sleep(0.1)
    before, start = asyncio.run(status(server)).output_tokens, time.perf_counter()
    time.sleep(seconds)
    rate = (asyncio.run(status(server)).output_tokens - before) / (time.perf_counter() - start)
    batch.stop()
    return rate


async def interactive(server: RunningServer, loads: list[Load], prompts: list[list[int]]) -> dict[str, Any]:
    """Latencies, and output tokens a second of everything in that time."""

    def ignore(_outcome: Outcome, _total: int) -> None:
        pass

    async with AsyncClient(server.endpoint) as client:
        before = (await client.status()).output_tokens
        outcomes, wall_s = await run_load(client, Run(loads, prompts), ignore)
        tokens = (await client.status()).output_tokens - before
    return {**report(outcomes, wall_s), "all_tokens_per_s": tokens / wall_s}


def beside(server: RunningServer, source: Path, output: Path, slowdown: float, todo: list[Ask], rate: float) -> Any:
    """The interactive run with a batch beside it; an infinite rate of waiting lines."""
    batch = Batch.start(server, source, output, slowdown)
    while not batch.num_done():
        time.sleep(0.1)
    try:
        return asyncio.run(interactive(server, *poisson(todo, rate)))
    finally:
        batch.stop()


def poisson(todo: list[Ask], rate: float) -> tuple[list[Load], list[list[int]]]:
    rng, now, loads = random.Random(3), 0.0, []
    for ask in todo:
        now += rng.expovariate(rate)
        loads.append(Load(now, len(ask.prompt), ask.output_tokens))
    return loads, [ask.prompt for ask in todo]


def compare(alone: dict[str, Any], with_batch: dict[str, Any], slowdown: float, left: float) -> dict[str, float]:
    ttft, normalized = (with_batch[name]["p95"] / alone[name]["p95"] for name in METRICS)
    batch_tokens = with_batch["all_tokens_per_s"] - with_batch["output_tokens_per_s"]
    return {
        "slowdown": slowdown,
        "ttft_p95": ttft,
        "normalized_p95": normalized,
        "batch_tokens": batch_tokens,
        "share_of_left": batch_tokens / left,
    }


def measure(args: argparse.Namespace, directory: Path, server: RunningServer) -> dict[str, Any]:
    vocab_size = asyncio.run(status(server)).vocab_size
    todo, filler = (asks(args.trace, count, args.scale, vocab_size) for count in (args.requests, 4000))
    source = directory / "in.jsonl"
    lines = ({"prompt": ask.prompt, "max_tokens": ask.output_tokens, "ignore_eos": True} for ask in filler)
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokens_per_s = capacity(server, source, directory, args.seconds)
    mean_tokens = sum(ask.output_tokens for ask in todo) / len(todo)
    rate = args.load * tokens_per_s / mean_tokens
    print(f"capacity {tokens_per_s:.0f} tokens/s; {rate:.2f} requests/s", file=sys.stderr)
    alone = asyncio.run(interactive(server, *poisson(todo, rate)))
    print("alone: " + ", ".join(f"{name} p95 {alone[name]['p95']:.3f}" for name in METRICS), file=sys.stderr)
    rows = []
    for slowdown in args.slowdown or (1.25, 2.0, 4.0):
        found = beside(server, source, directory / f"out-{slowdown}.jsonl", slowdown, todo, rate)
        rows.append(compare(alone, found, slowdown, (1 - args.load) * tokens_per_s))
        print(json.dumps(rows[-1]), file=sys.stderr)
    return {"capacity_tokens_per_s": tokens_per_s, "requests_per_s": rate, "alone": alone, "rows": rows}


def table(found: dict[str, Any]) -> str:
    lines = ["| S | TTFT, p95 | s per token, p95 | batch tokens/s | of what is left |", "|---|---|---|---|---|"]
    cells = "| {slowdown:g} | {ttft_p95:.2f} | {normalized_p95:.2f} | {batch_tokens:.0f} | {share_of_left:.0%} |"
    lines += [cells.format(**row) for row in found["rows"]]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--slowdown", type=float, action="append")
    parser.add_argument("--load", type=float, default=0.3)
    parser.add_argument("--scale", type=float, default=0.125)
    parser.add_argument("--seconds", type=float, default=20.0, help="How long the capacity is measured.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, RunningServer(Path(name), "--model", args.model) as server:
        found = measure(args, Path(name), server)
    print(json.dumps(found) if args.json else table(found))


if __name__ == "__main__":
    main()
