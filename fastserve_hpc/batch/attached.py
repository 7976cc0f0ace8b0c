"""Runs a batch file on a server that is running already."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass
from pathlib import Path

from fastserve_hpc.batch.progress import make_progress
from fastserve_hpc.batch.reader import count_lines, read_batch
from fastserve_hpc.batch.runner import BatchRunner
from fastserve_hpc.batch.summary import Counts
from fastserve_hpc.batch.writer import Mode, ResultWriter
from fastserve_hpc.client import AsyncClient
from fastserve_hpc.errors import EndpointError


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run went."""

    counts: Counts
    total: int
    """Lines of the input that are not blank."""
    stopped: str | None
    """Why the run ended before its input did; None when it did not."""


def run_attached(
    input_file: Path, output: Path, mode: Mode, in_flight: int, endpoint: str | None, job: str | None
) -> Ending:
    """Run the lines that `output` does not hold yet; SIGINT and SIGTERM end it early, nothing finished is lost."""
    return asyncio.run(_run_attached(input_file, output, mode, in_flight, endpoint, job))


async def _run_attached(
    input_file: Path, output: Path, mode: Mode, in_flight: int, endpoint: str | None, job: str | None
) -> Ending:
    _cancel_on_signals()
    with input_file.open("rb") as lines:
        total = count_lines(lines)
        lines.seek(0)
        async with AsyncClient(endpoint, job=job) as client:
            model = (await client.status()).model
            with ResultWriter(output, mode) as writer, make_progress(total) as progress:
                runner = BatchRunner(client, model, writer, progress, in_flight)
                stopped = None
                try:
                    await runner.run(read_batch(lines))
                except EndpointError as error:
                    stopped = str(error)
                except asyncio.CancelledError:
                    stopped = "told to stop"
    return Ending(runner.counts, total, stopped)


def _cancel_on_signals() -> None:
    """The first signal ends the run in good order; launchers send several."""
    task = asyncio.current_task()
    assert task is not None
    signals = (signal.SIGINT, signal.SIGTERM)

    def stop() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        task.cancel()

    for number in signals:
        asyncio.get_running_loop().add_signal_handler(number, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)  # rank 0 starts this process with them blocked
