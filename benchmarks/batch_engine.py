"""A batch file against the same requests held in memory, on one running server: what the file costs the engine.

python benchmarks/batch_engine.py --trace lengths.jsonl [--requests 1000] [--rounds 3] [--scale 0.125] [--json]

The lines of a trace ({"arrival_s", "prompt_tokens", "output_tokens"}) are scaled to the small model; without a trace
lengths are drawn. Both ways send the same token ids with the same number in flight, by turns; medians are compared.
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from serving import RunningServer

from fastserve_hpc.bench.trace import Load, make_prompts, read_trace, scaled_lengths
from fastserve_hpc.client import AsyncClient

VOCAB_SIZE = 49152


@dataclass(frozen=True, slots=True)
class Ask:
    prompt: list[int]
    output_tokens: int


def asks(trace: Path | None, count: int, scale: float) -> list[Ask]:
    if trace is None:
        rng = random.Random(1)
        loads = [Load(0.0, rng.randint(4, 200), rng.randint(4, 100)) for _ in range(count)]
    else:
        loads = scaled_lengths(read_trace(trace, count), scale)
    prompts = make_prompts(loads, VOCAB_SIZE, seed=1)
    return [Ask(prompt, load.output_tokens) for prompt, load in zip(prompts, loads, strict=True)]


async def from_memory(home: RunningServer, todo: Sequence[Ask], in_flight: int) -> float:
    """Output tokens a second."""
    waiting, tokens = iter(todo), 0
    async with AsyncClient(home.endpoint) as client:

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
    todo = asks(args.trace, args.requests, args.scale)
    rates: dict[str, list[float]] = {"memory": [], "file": []}
    with tempfile.TemporaryDirectory() as directory, RunningServer(Path(directory), "--model", args.model) as server:
        source = Path(directory, "in.jsonl")
        lines = ({"prompt": ask.prompt, "max_tokens": ask.output_tokens, "ignore_eos": True} for ask in todo)
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        for i in range(args.rounds):
            rates["memory"].append(asyncio.run(from_memory(server, todo, args.in_flight)))
            rates["file"].append(from_file(server, source, Path(directory, f"out-{i}.jsonl"), args.in_flight))
            print(
                f"round {i + 1}: " + ", ".join(f"{k} {v[-1]:.0f} tokens/s" for k, v in rates.items()), file=sys.stderr
            )
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratio = medians["file"] / medians["memory"]
    print(json.dumps({**rates, "ratio": ratio}) if args.json else f"file / memory: {ratio:.3f}")


if __name__ == "__main__":
    main()
