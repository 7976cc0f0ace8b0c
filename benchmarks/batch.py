"""What a batch run costs beside the engine: lines a second and memory, with a client that answers at once.

python benchmarks/batch.py [--lines 1000000] [--in-flight 256] [--rerun] [--order input] [--json]

Reading, checking, running, writing and syncing are the real thing; only the server is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from fastserve_hpc.batch.lines import Inputs
from fastserve_hpc.batch.manifest import Manifest
from fastserve_hpc.batch.ordering import by_prefix
from fastserve_hpc.batch.output import Mode, Output, Place, sort_files
from fastserve_hpc.batch.progress import PlainProgress
from fastserve_hpc.batch.reader import BatchReader
from fastserve_hpc.batch.runner import BatchRunner
from fastserve_hpc.batch.server import BatchServer
from fastserve_hpc.batch.survey import Shard, survey
from fastserve_hpc.bench.processes import peak_rss_bytes
from fastserve_hpc.client.results import Choice, Generation
from fastserve_hpc.protocol import Usage


class InstantClient:
    """In the place of `AsyncClient`."""

    async def generate(self, prompt: Any, **_: Any) -> Generation:
        await asyncio.sleep(0)
        return Generation([Choice(0, f"You said: {prompt}", [1, 2, 3, 4], [], "stop")], [], Usage(12, 4))


def write_input(path: Path, num_lines: int) -> None:
    with path.open("w") as file:
        for i in range(num_lines):
            body = {"prompt": f"Tell me something about the number {i}.", "max_tokens": 4}
            line = {"custom_id": f"request-{i}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")


def run(source: Path, output: Path, in_flight: int, sorts: bool) -> None:
    """One run as `fastserve-hpc batch` does it."""
    inputs, shard, place = Inputs([source]), Shard(), Place(output)
    found = survey(inputs, shard)
    now = Manifest(
        input_sha256=found.sha256,
        input_bytes=found.num_bytes,
        input_lines=found.last_index,
        shard=str(shard),
        errors=None,
        model="instant",
        vocab_size=1,
    )
    with PlainProgress() as progress, Output.open(place, now, found, mode=Mode()) as opened:
        progress.begin(found.num_lines)
        runner = BatchRunner(BatchServer(InstantClient(), "instant"), opened, progress, in_flight)
        asyncio.run(runner.run(by_prefix(BatchReader(inputs, shard, found, opened.done.lines))))
        opened.sync()
        if sorts:
            sort_files(place)


def rss_bytes(when: str) -> int:
    if when == "most":  # not by getrusage: its figure is at least that of the process that started this one
        return peak_rss_bytes(os.getpid())
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--rerun", action="store_true", help="Run a second time, when everything is done.")
    parser.add_argument("--order", choices=("finished", "input"), default="finished")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        source, output = Path(directory, "in.jsonl"), Path(directory, "out.jsonl")
        write_input(source, args.lines)
        rows = []
        for name in ["first run"] + ["rerun"] * args.rerun:
            before, start, cpu = rss_bytes("now"), time.perf_counter(), time.process_time()
            run(source, output, args.in_flight, args.order == "input")
            row = {
                "run": name,
                "lines": args.lines,
                "lines_per_s": args.lines / (time.perf_counter() - start),
                "lines_per_cpu_s": args.lines / (time.process_time() - cpu),
                "mib_above_start": (rss_bytes("most") - before) / 2**20,
            }
            rows.append(row)
            text = "{run}: {lines_per_s:.0f} lines/s, {lines_per_cpu_s:.0f} a second of processor time, "
            if not args.json:
                print((text + "{mib_above_start:.0f} MiB above start").format(**row))
    if args.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
