"""Interactive requests beside a batch file: what they lose, and what the batch gets, for several bounds S.

python benchmarks/batch_beside.py --trace lengths.jsonl [--seconds 100] [--slowdown 1.25 --slowdown 2 --slowdown 4]
    [--write docs/batch.md]

First the capacity: output tokens a second of batch lines alone. Then Poisson requests at 30 % of it (`--load`) without
a batch, and with one that never ends, for each S: the same requests at the same times. Latencies are compared with the
run without; what is left for the batch is the capacity without the tokens of the requests. The server has no prefix
cache, or later runs would find their prompts there. `--write` puts the table into a file, between two lines that name
this benchmark. It takes about (`--seconds` + 20) * (1 + number of S) + 70 seconds: 10 minutes for three S.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
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
from fastserve_hpc.bench.processes import OthersWatch
from fastserve_hpc.bench.trace import Load
from fastserve_hpc.client import AsyncClient

METRICS = ("ttft_s", "normalized_latency_s")
SETTLE_S = 15.0
"""Of a batch, until lines begin and end as they will later on, and not all at once."""
CAPACITY_S = 40.0
MIN_REQUESTS = 40
BEGIN, END = "<!-- table of benchmarks/batch_beside.py -->", "<!-- end of it -->"


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

    def settle(self) -> None:
        while not self.num_done():
            if self.process.poll() is not None:
                raise SystemExit(f"the batch ended with {self.process.returncode} before its first line was done")
            time.sleep(0.1)
        time.sleep(SETTLE_S)


def capacity(server: RunningServer, source: Path, directory: Path) -> float:
    """Output tokens a second of a batch that has the server to itself."""
    batch = Batch.start(server, source, directory / "capacity.jsonl", 1000.0)
    batch.settle()
    before, start = asyncio.run(status(server)).output_tokens, time.perf_counter()
    time.sleep(CAPACITY_S)
    rate = (asyncio.run(status(server)).output_tokens - before) / (time.perf_counter() - start)
    batch.stop()
    return rate


async def interactive(server: RunningServer, loads: list[Load], prompts: list[list[int]]) -> dict[str, Any]:
    """Latencies, and output tokens a second of everything in that time."""
    num_done = 0

    def say(_outcome: Outcome, total: int) -> None:
        nonlocal num_done
        num_done += 1
        if num_done % 20 == 0:
            print(f"{num_done}/{total} requests", file=sys.stderr)

    others = OthersWatch()
    async with AsyncClient(server.endpoint) as client:
        before, start = (await client.status()).output_tokens, time.perf_counter()
        outcomes, wall_s = await run_load(client, Run(loads, prompts), say)
        tokens_per_s = ((await client.status()).output_tokens - before) / (time.perf_counter() - start)
    found = {**report(outcomes, wall_s), "all_tokens_per_s": tokens_per_s, "other_busy_cores": others.busy_cores()}
    if found["failed"]:
        raise SystemExit(f"{found['failed']} requests failed, the first with: {_first_error(outcomes)}")
    return found


def _first_error(outcomes: list[Outcome]) -> str | None:
    return next(outcome.error for outcome in outcomes if outcome.error is not None)


def beside(server: RunningServer, source: Path, output: Path, slowdown: float, todo: list[Ask], rate: float) -> Any:
    """The interactive run with a batch beside it; an infinite rate of waiting lines."""
    batch = Batch.start(server, source, output, slowdown)
    try:
        batch.settle()
        return asyncio.run(interactive(server, *poisson(todo, rate)))
    finally:
        batch.stop()


def poisson(todo: list[Ask], rate: float) -> tuple[list[Load], list[list[int]]]:
    rng, now, loads = random.Random(3), 0.0, []
    for ask in todo:
        now += rng.expovariate(rate)
        loads.append(Load(now, len(ask.prompt), ask.output_tokens))
    return loads, [ask.prompt for ask in todo]


def compare(alone: dict[str, Any], with_batch: dict[str, Any], slowdown: float, most: float) -> dict[str, float]:
    ttft, normalized = (with_batch[name]["p95"] / alone[name]["p95"] for name in METRICS)
    batch_tokens = with_batch["all_tokens_per_s"] - with_batch["output_tokens_per_s"]
    return {
        "slowdown": slowdown,
        "ttft_p95": ttft,
        "normalized_p95": normalized,
        "batch_tokens": batch_tokens,
        "share_of_left": batch_tokens / (most - with_batch["output_tokens_per_s"]),
        "other_busy_cores": round(with_batch["other_busy_cores"], 2),
    }


def measure(args: argparse.Namespace, directory: Path, server: RunningServer) -> dict[str, Any]:
    filler = asks(args.trace, 4000, args.scale, asyncio.run(status(server)).vocab_size)
    source = directory / "in.jsonl"
    lines = ({"prompt": ask.prompt, "max_tokens": ask.output_tokens, "ignore_eos": True} for ask in filler)
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokens_per_s = capacity(server, source, directory)
    rate = args.load * tokens_per_s / statistics.fmean(ask.output_tokens for ask in filler)
    todo = filler[-max(MIN_REQUESTS, round(rate * args.seconds)) :]
    print(f"capacity {tokens_per_s:.0f} tokens/s; {len(todo)} requests, {rate:.2f} a second", file=sys.stderr)
    alone = asyncio.run(interactive(server, *poisson(todo, rate)))
    shown = {name: alone[name] for name in (*METRICS, "other_busy_cores")}
    print(f"alone: {json.dumps(shown)}", file=sys.stderr)
    rows = []
    for slowdown in args.slowdown or (1.25, 2.0, 4.0):
        found = beside(server, source, directory / f"out-{slowdown}.jsonl", slowdown, todo, rate)
        rows.append(compare(alone, found, slowdown, tokens_per_s))
        print(json.dumps(rows[-1]), file=sys.stderr)
    return {"capacity_tokens_per_s": tokens_per_s, "requests_per_s": rate, "alone": alone, "rows": rows}


def table(found: dict[str, Any]) -> str:
    lines = ["| S | TTFT, p95 | s per token, p95 | batch tokens/s | of what is left |", "|---|---|---|---|---|"]
    cells = "| {slowdown:g} | {ttft_p95:.2f} | {normalized_p95:.2f} | {batch_tokens:.0f} | {share_of_left:.0%} |"
    lines += [cells.format(**row) for row in found["rows"]]
    return "\n".join(lines)


def sentence(found: dict[str, Any]) -> str:
    """What the table is of, in lines as long as those of the documentation."""
    ttft_s, token_s = (found["alone"][name]["p95"] for name in METRICS)
    return (
        f"On a real server on {len(os.sched_getaffinity(0))} cores, with a capacity of "
        f"{found['capacity_tokens_per_s']:.0f} tokens/s (without the batch p95 is {ttft_s:.2f} s for the\n"
        f"first token, {token_s:.3f} s a token):"
    )


def write_into(path: Path, text: str) -> None:
    """Put the table where the last one was."""
    before, _, rest = path.read_text().partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{path} has no lines {BEGIN} and {END}; the table:\n{text}")
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--slowdown", type=float, action="append")
    parser.add_argument("--load", type=float, default=0.3)
    parser.add_argument("--scale", type=float, default=0.125)
    parser.add_argument("--seconds", type=float, default=100.0, help="How long requests come, each time.")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    settings = ("--model", args.model, "--prefix-cache", "off")
    with tempfile.TemporaryDirectory() as name, RunningServer(Path(name), *settings) as server:
        found = measure(args, Path(name), server)
    if args.write is not None:
        write_into(args.write, f"{sentence(found)}\n\n{table(found)}")
    print(json.dumps(found) if args.json else table(found))


if __name__ == "__main__":
    main()
