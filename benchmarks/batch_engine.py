"""A batch file against the same requests held in memory, on one running server: what the file costs the engine.

python benchmarks/batch_engine.py --trace lengths.jsonl [--requests 1000] [--rounds 2] [--scale 0.125] [--json]

The lines of a trace ({"arrival_s", "prompt_tokens", "output_tokens"}) are scaled to the small model; without a trace
lengths are drawn. Both ways send the same token ids in the same order with the same number in flight, in pairs that
take turns who is first; the median of the pairs' ratios counts. The server has no prefix cache, or the second to come
would find its prompts there. On a busy machine look at the iterations: an engine that is kept as full needs as many.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from serving import RunningServer

from fastserve_hpc.bench.processes import OthersWatch
from fastserve_hpc.bench.trace import Load, make_prompts, read_trace, scaled_lengths
from fastserve_hpc.client import AsyncClient
from fastserve_hpc.core.engine import EngineStatus

SAY_S = 10.0
"""Between two words of progress."""


@dataclass(frozen=True, slots=True)
class Ask:
    prompt: list[int]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of all requests, in one of the two ways."""

    tokens_per_s: float
    iterations: int
    other_busy_cores: float


def asks(trace: Path | None, count: int, scale: float, vocab_size: int) -> list[Ask]:
    if trace is None:
        rng = random.Random(1)
        loads = [Load(0.0, rng.randint(4, 200), rng.randint(4, 100)) for _ in range(count)]
    else:
        loads = scaled_lengths(read_trace(trace, count), scale)
    prompts = make_prompts(loads, vocab_size, seed=1)
    return [Ask(prompt, load.output_tokens) for prompt, load in zip(prompts, loads, strict=True)]


async def status(server: RunningServer) -> EngineStatus:
    async with AsyncClient(server.endpoint) as client:
        return await client.status()


async def from_memory(server: RunningServer, todo: Sequence[Ask], in_flight: int) -> float:
    """Output tokens a second."""
    waiting, tokens, num_done = iter(todo), 0, 0
    async with AsyncClient(server.endpoint) as client:

        async def work() -> None:
            nonlocal tokens, num_done
            for ask in waiting:
                options = {"max_tokens": ask.output_tokens, "ignore_eos": True, "service_class": "batch"}
                answer = await client.generate(ask.prompt, **options)
                tokens, num_done = tokens + answer.usage.completion_tokens, num_done + 1

        async def say() -> None:
            while True:
                await asyncio.sleep(SAY_S)
                print(f"{num_done}/{len(todo)} requests", file=sys.stderr)

        start, saying = time.perf_counter(), asyncio.create_task(say())
        await asyncio.gather(*(work() for _ in range(in_flight)))
        saying.cancel()
        return tokens / (time.perf_counter() - start)


def from_file(server: RunningServer, source: Path, output: Path, in_flight: int) -> float:
    """The same by `fastserve-hpc batch`, as its summary has it: with the last sync, without the start of Python."""
    files = ("--input", str(source), "--output", str(output), "--in-flight", str(in_flight))
    summary = json.loads(server.command("batch", "--endpoint", server.endpoint, *files, "--json", shows_errors=True))
    return float(summary["output_tokens_per_s"])


def measured(server: RunningServer, way: Callable[[], float]) -> Measured:
    others, before = OthersWatch(), asyncio.run(status(server)).iterations
    rate = way()
    return Measured(rate, asyncio.run(status(server)).iterations - before, round(others.busy_cores(), 2))


def pairs(args: argparse.Namespace, directory: Path, server: RunningServer) -> list[dict[str, Measured]]:
    todo = asks(args.trace, args.requests, args.scale, asyncio.run(status(server)).vocab_size)
    source = directory / "in.jsonl"
    lines = ({"prompt": ask.prompt, "max_tokens": ask.output_tokens, "ignore_eos": True} for ask in todo)
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asyncio.run(from_memory(server, todo[: args.warm_up], args.in_flight))
    found: list[dict[str, Measured]] = []
    for i in range(args.rounds):
        output = directory / f"out-{i}.jsonl"
        ways = {
            "memory": lambda: asyncio.run(from_memory(server, todo, args.in_flight)),
            "file": lambda output=output: from_file(server, source, output, args.in_flight),
        }
        found.append({name: measured(server, ways[name]) for name in list(ways)[:: 1 - 2 * (i % 2)]})
        print(f"round {i + 1} of {args.rounds}: {found[-1]}, file / memory {ratio(found[-1]):.3f}", file=sys.stderr)
    return found


def ratio(pair: dict[str, Measured]) -> float:
    return pair["file"].tokens_per_s / pair["memory"].tokens_per_s


def summary(found: list[dict[str, Measured]]) -> dict[str, Any]:
    iterations = {name: sum(pair[name].iterations for pair in found) for name in ("memory", "file")}
    return {
        "pairs": [{name: asdict(run) for name, run in pair.items()} for pair in found],
        "iterations": iterations["file"] / iterations["memory"],
        "ratio": statistics.median(map(ratio, found)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--scale", type=float, default=0.125)
    parser.add_argument("--rounds", type=int, default=2, help="Pairs.")
    parser.add_argument("--warm-up", type=int, default=64, help="Requests that are not counted.")
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    settings = ("--model", args.model, "--prefix-cache", "off")
    with tempfile.TemporaryDirectory() as directory, RunningServer(Path(directory), *settings) as server:
        found = summary(pairs(args, Path(directory), server))
    print(json.dumps(found) if args.json else "iterations, file / memory: {iterations:.3f}".format(**found))
    if not args.json:
        print("tokens/s, file / memory: {ratio:.3f}".format(**found))


if __name__ == "__main__":
    main()
