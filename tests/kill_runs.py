"""Kills batch runs at random moments and cuts their files at random bytes: `kill_runs.py DIRECTORY NUM_RUNS SEED`.

Each run is a process forked from this one, so that a kill hits the work and not the interpreter's start. Its server is
made up, everything else is the real thing. Ends with an error if anything is lost, twice, or different.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import random
import signal
import sys
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import fastserve_hpc.client
from fastserve_hpc.batch import attached
from fastserve_hpc.batch.attached import BatchFiles, run_attached
from fastserve_hpc.batch.output import Place
from fastserve_hpc.client.results import Choice, Generation
from fastserve_hpc.core.engine import BlockUsage, EngineStatus
from fastserve_hpc.errors import FastServeError, RequestError
from fastserve_hpc.protocol import Usage

NUM_LINES = 80
STATUS = EngineStatus(
    "ready", "made-up", 100, 1, 1, 1, "fcfs", 0, 0, BlockUsage(1, 0), BlockUsage(0, 0), 0, 1.0, vocab_size=9
)


class MadeUpClient:
    """Says who the server is."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> MadeUpClient:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def status(self) -> EngineStatus:
        return STATUS


class MadeUpAsyncClient:
    """Its answers depend on the prompt alone and take a moment; some prompts are refused."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._delays = random.Random(os.getpid())

    async def status(self) -> EngineStatus:
        return STATUS

    async def __aenter__(self) -> MadeUpAsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def generate(self, prompt: str, **_: Any) -> Generation:
        await asyncio.sleep(self._delays.uniform(0, 0.004))
        if prompt.endswith("7"):
            raise RequestError("a prompt that ends with 7", code="context_length_exceeded")
        return Generation([Choice(0, prompt[::-1] * 20, [1], [], "stop")], [], Usage(5, 1))


@dataclass(frozen=True)
class Case:
    """One batch and how it is treated."""

    directory: Path
    rng: random.Random

    def make(self) -> BatchFiles:
        name = self.rng.choice(["in.jsonl", "in.jsonl.gz"])
        lines = [json.dumps({"custom_id": f"id-{i}", "prompt": f"prompt {i}"}) for i in range(NUM_LINES)]
        for broken in ("{", '{"custom_id": "id-3", "prompt": "again"}', ""):
            lines.insert(self.rng.randrange(5, NUM_LINES), broken)
        text = "\n".join(lines).encode()
        (self.directory / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
        errors = self.rng.choice([None, self.directory / "errors.jsonl"])
        return BatchFiles(
            inputs=(self.directory / name,),
            place=Place(self.directory / "out.jsonl", errors),
            sorts=self.rng.random() < 0.5,
            in_flight=self.rng.choice([1, 4, 16]),
        )


def fork_run(files: BatchFiles) -> int:
    """The process that runs it; its exit status is the command's."""
    signals = (signal.SIGINT, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # as rank 0 starts it
    pid = os.fork()
    if pid == 0:
        _run_and_exit(files)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    return pid


def _run_and_exit(files: BatchFiles) -> NoReturn:
    code = 1
    try:
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), 2)
        ending = run_attached(files, None, None)
        code = 75 if ending.stopped else 3 if ending.counts.all_failed else 0
    except FastServeError as error:
        code = error.exit_code
        if code != 75:
            print(f"run failed: {error}", flush=True)
    except KeyboardInterrupt:  # when all was done
        code = 75
    except BaseException:
        print(traceback.format_exc(), flush=True)
    finally:
        os._exit(code)


def harm(files: BatchFiles, rng: random.Random) -> str:
    """One run that does not end well."""
    pid = fork_run(files)
    time.sleep(rng.uniform(0, 0.25))
    number = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    os.kill(pid, number)
    if number != signal.SIGKILL and rng.random() < 0.5:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)  # launchers do that
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in ({-9, 3} if number == signal.SIGKILL else {75, 3, -number}), f"{code} after signal {number}"
    if rng.random() < 0.5:
        _, path = rng.choice(files.place.files)
        if path.exists():
            os.truncate(path, rng.randint(0, path.stat().st_size))
    num_kept = sum(path.read_bytes().count(b"\n") for _, path in files.place.files if path.exists())
    return f"{number.name}: {code}, {num_kept} lines kept"


def finished_records(files: BatchFiles) -> list[dict[str, Any]]:
    """Run to the end; what is there then, without times, in the order of the input."""
    _, status = os.waitpid(fork_run(files), 0)
    assert os.waitstatus_to_exitcode(status) == 3
    records = []
    for _, path in files.place.files:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        order = [number_of(record) for record in lines]
        assert not files.sorts or order == sorted(order), "not in the order of the input"
        records += lines
    for record in records:
        if record["response"]:
            del record["response"]["body"]["created"]
    return sorted(records, key=number_of)


def number_of(record: dict[str, Any]) -> int:
    return int(record["id"].removeprefix("batch_req_"))


def main(directory: Path, num_runs: int, seed: int) -> None:
    fastserve_hpc.client.Client = MadeUpClient  # type: ignore[misc, assignment]
    attached.AsyncClient = MadeUpAsyncClient  # type: ignore[misc, assignment]
    num_in_the_middle = 0
    for run in range(num_runs):
        rng = random.Random(1000 * seed + run)
        case = Case(directory / str(run), rng)
        case.directory.mkdir()
        files = case.make()
        expected = finished_records(replace(files, in_flight=16))
        for path in [*(p for _, p in files.place.files), *files.place.state.iterdir()]:
            path.unlink()
        story = [harm(files, rng) for _ in range(rng.randint(1, 4))]
        num_in_the_middle += sum(not text.endswith((" 0 lines kept", f" {len(expected)} lines kept")) for text in story)
        found = finished_records(replace(files, in_flight=16))
        ids = [record["custom_id"] for record in found if record["custom_id"] is not None]
        assert len(ids) == len(set(ids)) == NUM_LINES, f"run {run}: {story}"
        assert found == expected, f"run {run}: {story}"
    print(f"{num_runs} runs, {num_in_the_middle} times left in the middle")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
