"""Shows how far a batch run has come: a bar on a terminal, now and then a plain or JSON line in a log."""

from __future__ import annotations

import json
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

import click

from fastserve_hpc.batch.forecast import Forecast, forecast
from fastserve_hpc.batch.summary import Counts

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PLAIN_PERIOD_S = 5.0
BAR_PERIOD_S = 0.1
READING_S = 2.0
"""An input that is read in less is not worth a word."""


class LineProgress:
    """A line on standard error at most every few seconds, and a last one; a context manager."""

    _period_s = PLAIN_PERIOD_S

    def __init__(self, job_end: float | None = None) -> None:
        """`job_end`: when the job will be ended, in seconds since 1970."""
        self.total = 0
        """Lines, once they are counted."""
        self._job_end = job_end
        self._next = 0.0

    def __enter__(self) -> LineProgress:
        self._next = time.monotonic() + READING_S
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Nothing to close."""

    def reading(self, num_lines: int) -> None:
        """So many lines of the input are counted."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._period_s
            self.say(f"reading the input, {num_lines} lines so far")

    def begin(self, total: int) -> None:
        """The input has so many lines; from now on they are answered."""
        self.total = total
        self._next = time.monotonic() + self._period_s

    def update(self, counts: Counts) -> None:
        now = time.monotonic()
        if now >= self._next or counts.finished == self.total:
            self._next = now + self._period_s
            self._show(counts)

    def say(self, text: str) -> None:
        """Tell something else."""
        click.echo(f"batch: {text}", err=True)

    def _forecast(self, counts: Counts) -> Forecast:
        job_left_s = None if self._job_end is None else self._job_end - time.time()
        return forecast(counts, self.total, counts.wall_s, job_left_s)

    def _show(self, counts: Counts) -> None:
        raise NotImplementedError


class PlainProgress(LineProgress):
    """For people who read a log."""

    def begin(self, total: int) -> None:
        super().begin(total)
        click.echo(f"batch: {total} line{'' if total == 1 else 's'}", err=True)

    def _show(self, counts: Counts) -> None:
        click.echo(f"batch: {state_line(counts, self.total)}{self._forecast(counts).text()}", err=True)


class JsonProgress(LineProgress):
    """For programs: a JSON object a line."""

    def say(self, text: str) -> None:
        click.echo(json.dumps({"event": "message", "text": text}), err=True)

    def _show(self, counts: Counts) -> None:
        ahead = self._forecast(counts)
        state = {
            "event": "progress",
            "lines": self.total,
            "finished": counts.finished,
            "failed": counts.all_failed,
            "skipped": counts.skipped,
            "in_flight": counts.in_flight,
            "wall_s": round(counts.wall_s, 3),
            "output_tokens": counts.output_tokens,
            "output_tokens_per_s": round(counts.output_tokens_per_s, 1),
            "left_s": ahead.left_s,
            "job_left_s": ahead.job_left_s,
            "share_by_job_end": ahead.share_by_end,
        }
        click.echo(json.dumps(state), err=True)


class BarProgress(LineProgress):
    """A rich bar on a terminal."""

    _period_s = BAR_PERIOD_S

    def __init__(self, job_end: float | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        super().__init__(job_end)
        columns = (BarColumn(), TextColumn("{task.description}", markup=False))
        self._bar: Progress = Progress(*columns, console=Console(stderr=True))
        self._task: TaskID = self._bar.add_task("reading the input", total=None)

    def __enter__(self) -> BarProgress:
        super().__enter__()
        self._bar.start()
        return self

    def reading(self, num_lines: int) -> None:
        self._bar.update(self._task, description=f"reading the input, {num_lines} lines so far")

    def begin(self, total: int) -> None:
        super().begin(total)
        self._bar.update(self._task, total=total, description=f"0 of {total} lines")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        self._bar.console.print(f"batch: {text}", markup=False, highlight=False)

    def _show(self, counts: Counts) -> None:
        text = state_line(counts, self.total) + self._forecast(counts).text()
        self._bar.update(self._task, completed=counts.finished, description=text)


def make_progress(job_end: float | None = None, as_json: bool = False) -> LineProgress:
    """What suits the place that standard error goes to."""
    if as_json:
        return JsonProgress(job_end)
    return (BarProgress if sys.stderr.isatty() else PlainProgress)(job_end)


def state_line(counts: Counts, total: int) -> str:
    """As in "12 of 48 lines, 1 failed, 8 in flight, 153 tokens/s"."""
    failed = f", {counts.all_failed} failed" if counts.all_failed else ""
    in_flight = f", {counts.in_flight} in flight" if counts.in_flight else ""
    return f"{counts.finished} of {total} lines{failed}{in_flight}, {counts.tokens_per_s:.0f} tokens/s"
