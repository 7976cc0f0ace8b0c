"""When a run will be done, and whether its job lasts that long."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastserve_hpc.batch.summary import Counts

MIN_LINES = 8
"""Of this run, before anything is foretold."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """All times from now."""

    left_s: float | None
    """Until all lines are done, at the pace of this run; None while there is no pace yet."""
    job_left_s: float | None = None
    """Until the time limit ends the job; None outside of a job."""
    share_by_end: float = 1.0
    """Of all lines, those that will be done by then."""

    @property
    def fits(self) -> bool:
        return self.share_by_end >= 1.0

    def text(self) -> str:
        """As in ", 0:01:20 left", with a warning where the job is too short; may be empty."""
        if self.left_s is None:
            return ""
        left = f", {clock(self.left_s)} left"
        if self.fits or self.job_left_s is None:
            return left
        return (
            f"{left}; will not finish: the job ends in {clock(self.job_left_s)}, with about "
            f"{math.floor(100 * self.share_by_end)} % done; the next run goes on from there"
        )


def forecast(counts: Counts, total: int, elapsed_s: float, job_left_s: float | None) -> Forecast:
    """By the lines that this run has done so far."""
    num_done = counts.finished - counts.skipped
    if num_done < MIN_LINES:
        return Forecast(None, job_left_s)
    left_s = (total - counts.finished) * elapsed_s / num_done
    if job_left_s is None or left_s <= job_left_s:
        return Forecast(left_s, job_left_s)
    by_end = counts.finished + max(0.0, job_left_s) * num_done / elapsed_s
    return Forecast(left_s, job_left_s, by_end / total)


def clock(seconds: float) -> str:
    """As in 1:02:03."""
    whole = max(0, round(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
