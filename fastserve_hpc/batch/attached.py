"""Runs batch files on a server that is running already."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fastserve_hpc import client
from fastserve_hpc.batch import manifest as manifests
from fastserve_hpc.batch.deadline import TICK_S, Pacer
from fastserve_hpc.batch.lines import Inputs
from fastserve_hpc.batch.manifest import Manifest
from fastserve_hpc.batch.ordering import by_prefix
from fastserve_hpc.batch.output import Mode, Output, Place, sort_files
from fastserve_hpc.batch.progress import LineProgress, make_progress
from fastserve_hpc.batch.reader import BatchItem, BatchReader, LineError, Task
from fastserve_hpc.batch.runner import BatchRunner
from fastserve_hpc.batch.server import BatchServer
from fastserve_hpc.batch.stopping import StopSignals
from fastserve_hpc.batch.summary import Counts
from fastserve_hpc.batch.survey import Shard, Survey, check_unchanged, survey
from fastserve_hpc.client import AsyncClient
from fastserve_hpc.core.engine import EngineStatus
from fastserve_hpc.core.request import DEFAULT_SLOWDOWN
from fastserve_hpc.errors import EndpointError, StoppedError
from fastserve_hpc.slurm.environ import job_end_time

SLOW_DISK_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFiles:
    """What to read, where to write, and how."""

    task: Task = "batch"
    inputs: tuple[Path, ...]
    place: Place
    shard: Shard = Shard()
    mode: Mode = Mode()
    sorts: bool = False
    """Whether the finished output is put into the order of the input."""
    in_flight: int = 256
    wants_ttft: bool = False
    slowdown: float = DEFAULT_SLOWDOWN
    """Of interactive requests, because of this run."""
    deadline: float | None = None
    """When it is to be done, in seconds since 1970."""
    reconnect_s: float = 0.0
    engine: Mapping[str, str] = field(default_factory=dict)
    """Settings of the server that change answers, where they are known."""
    json_progress: bool = False


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run went."""

    counts: Counts
    total: int
    """Lines of this shard that are not blank."""
    stopped: str | None
    """Why the run ended before its input did; None when it did not."""


def run_attached(files: BatchFiles, endpoint: str | None, job: str | None) -> Ending:
    """Run the lines that the output does not hold yet; SIGINT and SIGTERM end it early, nothing finished is lost.

    Raises `ConfigError` where input and output do not fit, `FastServeError` where nothing more can be written.
    """
    with StopSignals() as signals:
        with client.Client(endpoint, job=job) as asking:
            status = asking.status()
        return _AttachedRun(files, status, signals).run(endpoint, job)


class _AttachedRun:
    """One run, on a server that has said what it is."""

    def __init__(self, files: BatchFiles, status: EngineStatus, signals: StopSignals) -> None:
        self._files = files
        self._status = status
        self._signals = signals
        self._inputs = Inputs(files.inputs)

    def run(self, endpoint: str | None, job: str | None) -> Ending:
        files, state = self._files, self._inputs.state()
        progress = make_progress(job_end_time(), files.json_progress)
        with progress:
            if self._status.state == "starting":
                progress.say("the server is starting")
            found = survey_for(files, self._inputs, progress.reading)
            now = manifest_of(files, found, self._status)
            progress.begin(found.num_lines)
            with Output.open(files.place, now, found, mode=files.mode, say=progress.say) as output:
                items = BatchReader(self._inputs, files.shard, found, output.done.lines, files.task)
                try:
                    counts, stopped = asyncio.run(self._answer(items, output, progress, AsyncClient(endpoint, job=job)))
                except asyncio.CancelledError:
                    raise StoppedError("told to stop; run the same command again to go on") from None
                finally:
                    self._signals.ignore()  # results are about to be written and synced
                check_unchanged(self._inputs, state)
                with said_if_slow(progress.say):
                    output.sync()
                if files.sorts and stopped is None:
                    self._signals.interrupt()
                    sort_files(files.place)
        return Ending(counts, found.num_lines, stopped)

    async def _answer(
        self, items: Iterable[BatchItem | LineError], output: Output, progress: LineProgress, connecting: AsyncClient
    ) -> tuple[Counts, str | None]:
        """What was done, and why it ended early if it did."""
        files = self._files
        task = asyncio.current_task()
        assert task is not None
        self._signals.cancel(task)
        async with connecting as connected:
            server = BatchServer(
                connected,
                self._status.model,
                wants_ttft=files.wants_ttft,
                slowdown=files.slowdown,
                reconnect_s=files.reconnect_s,
                say=progress.say,
            )
            runner = BatchRunner(server, output, progress, files.in_flight)
            watching = asyncio.create_task(self._watch(runner.counts, server, progress))
            try:
                stopped = await _why_stopped(runner, by_prefix(items))
            finally:
                watching.cancel()
            if stopped is None:
                runner.counts.server = await server.used_since(self._status)
            return runner.counts, stopped

    async def _watch(self, counts: Counts, server: BatchServer, progress: LineProgress) -> None:
        """Show progress though no line ends, and hurry where there is a deadline."""
        pacer = None
        if self._files.deadline is not None:
            pacer = Pacer(self._files.deadline, progress.total, self._files.slowdown, progress.say)
        while True:
            await asyncio.sleep(TICK_S)
            progress.update(counts)
            if pacer is not None:
                pacer.tick(counts)
                await server.steer(pacer.slowdown)


@contextmanager
def said_if_slow(say: Callable[[str], None]) -> Iterator[None]:
    """While results go to the disk: on one that others keep busy it may take minutes, and would look like a hang."""
    notice = threading.Timer(SLOW_DISK_S, say, ["waiting for the disk to take the last results"])
    notice.daemon = True
    notice.start()
    try:
        yield
    finally:
        notice.cancel()


async def _why_stopped(runner: BatchRunner, items: Iterable[BatchItem | LineError]) -> str | None:
    try:
        await runner.run(items)
        if runner.num_put_off:
            return f"{runner.num_put_off} lines would not be finished when the server's job ends"
    except EndpointError as error:
        return str(error)
    except asyncio.CancelledError:
        return "told to stop"
    return None


def survey_for(files: BatchFiles, inputs: Inputs, on_lines: Callable[[int], None] = lambda _: None) -> Survey:
    """The first reading; it marks where the input of an earlier run ended."""
    then = None
    if not files.mode.overwrite and not files.place.is_stdout:
        then = manifests.load(files.place.manifest, files.place.output)
    return survey(inputs, files.shard, None if then is None else then.input_bytes, on_lines)


def manifest_of(files: BatchFiles, found: Survey, status: EngineStatus) -> Manifest:
    """What the results of this run are results of."""
    return Manifest(
        task=files.task,
        input_sha256=found.sha256,
        input_bytes=found.num_bytes,
        input_lines=found.last_index,
        shard=str(files.shard),
        errors=files.place.errors_name(),
        model=status.model,
        vocab_size=status.vocab_size,
        engine=dict(files.engine),
    )
