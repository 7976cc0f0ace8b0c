"""Shows how far a batch run has come: a bar on a terminal, now and then a plain line in a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

import click

from fastserve_hpc.batch.summary import Counts

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PLAIN_PERIOD_S = 5.0


class PlainProgress:
    """A line on standard error at most every few seconds, and a last one; a context manager."""

    def __init__(self, total: int, period_s: float = PLAIN_PERIOD_S):
        self._total = total
        self._period_s = period_s
        self._next = time.monotonic() + period_s

    def __enter__(self) -> PlainProgress:
        click.echo(f"batch: {self._total} lines", err=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Nothing to close."""

    def update(self, counts: Counts) -> None:
        now = time.monotonic()
        if now >= self._next or counts.finished == self._total:
            self._next = now + self._period_s
            click.echo(f"batch: {state_line(counts, self._total)}", err=True)


class BarProgress:
    """A rich bar on standard error; a context manager."""

    def __init__(self, total: int):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self._bar: Progress = Progress(*columns, console=Console(stderr=True))
        self._task: TaskID = self._bar.add_task(f"0 of {total} lines", total=total)
        self._total = total

    def __enter__(self) -> BarProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, counts: Counts) -> None:
        self._bar.update(self._task, completed=counts.finished, description=state_line(counts, self._total))


def make_progress(total: int) -> PlainProgress | BarProgress:
    """What suits the place that standard error goes to."""
    return BarProgress(total) if sys.stderr.isatty() else PlainProgress(total)


def state_line(counts: Counts, total: int) -> str:
    """As in "12 of 48 lines, 1 failed, 153 tokens/s"."""
    failed = f", {counts.failed} failed" if counts.failed else ""
    return f"{counts.finished} of {total} lines{failed}, {counts.output_tokens_per_s:.0f} tokens/s"
