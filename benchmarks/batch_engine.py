"""A batch file against the same requests held in memory, on one running server: what the file costs the engine.

python benchmarks/batch_engine.py --trace lengths.jsonl [--requests 1000] [--rounds 3] [--scale 0.125] [--json]

The lines of a trace ({"arrival_s", "prompt_tokens", "output_tokens"}) are scaled to the small model; without a trace
lengths are drawn. Both ways send the same token ids with the same number in flight, by turns; medians are compared. On
a busy machine look at the iterations: an engine that is kept as full needs as many.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving import RunningServer

from fastserve_hpc.bench.trace import Load, make_prompts, read_trace, scaled_lengths
from fastserve_hpc.client import AsyncClient
from fastserve_hpc.core.engine import EngineStatus


@dataclass(frozen=True, slots=True)
class Ask:
    prompt: list[int]
    output_tokens: int


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
    waiting, tokens = iter(todo), 0
    async with AsyncClient(server.endpoint) as client:

        async def work() -> None:
            nonlocal tokens
            for ask in waiting:
                options = {"max_tokens": ask.output_tokens, "ignore_eos": True, "service_class": "batch"}
                answer = await client.generate(ask.prompt, **options)
                tokens += answer.usage.completion_tokens

        start = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(in_flight)))
        return tokens / (time.perf_counter() - start)


def from_file(server: RunningServer, source: Path, output: Path, in_flight: int) -> float:
    """The same by `fastserve-hpc batch`, as its summary has it."""
    files = ("--input", str(source), "--output", str(output), "--in-flight", str(in_flight))
    summary = json.loads(server.command("batch", "--endpoint", server.endpoint, *files, "--json"))
    return float(summary["output_tokens_per_s"])


def measure(args: argparse.Namespace, directory: Path, server: RunningServer) -> dict[str, Any]:
    todo = asks(args.trace, args.requests, args.scale, asyncio.run(status(server)).vocab_size)
    source = directory / "in.jsonl"
    lines = ({"prompt": ask.prompt, "max_tokens": ask.output_tokens, "ignore_eos": True} for ask in todo)
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ways: dict[str, Callable[[int], float]] = {
        "memory": lambda _: asyncio.run(from_memory(server, todo, args.in_flight)),
        "file": lambda i: from_file(server, source, directory / f"out-{i}.jsonl", args.in_flight),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    iterations: dict[str, list[int]] = {name: [] for name in ways}
    for i in range(args.rounds):
        for name in list(ways)[:: 1 - 2 * (i % 2)]:
            before = asyncio.run(status(server)).iterations
            rates[name].append(ways[name](i))
            iterations[name].append(asyncio.run(status(server)).iterations - before)
            print(f"{name}: {rates[name][-1]:.0f} tokens/s, {iterations[name][-1]} iterations", file=sys.stderr)
    ratio = statistics.median(rates["file"]) / statistics.median(rates["memory"])
    return {"tokens_per_s": rates, "iterations": iterations, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--scale", type=float, default=0.125)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, RunningServer(Path(directory), "--model", args.model) as server:
        found = measure(args, Path(directory), server)
    print(json.dumps(found) if args.json else "file / memory: {ratio:.3f} ({iterations})".format(**found))


if __name__ == "__main__":
    main()
