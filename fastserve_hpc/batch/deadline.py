"""A run that is to be done by a given time: it takes a larger share of the server as that draws near."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable
from datetime import datetime, timedelta

from fastserve_hpc.batch.forecast import clock
from fastserve_hpc.batch.summary import Counts
from fastserve_hpc.errors import ConfigError

NO_BOUND = 1000.0
"""A slowdown that bounds nothing."""
TICK_S = 1.0
_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.IGNORECASE)
_RESERVE = 0.9
"""Of the time that is left, what is planned with."""
_RECENT = 20
"""Ticks whose pace counts."""
_MIN_TICKS = 5
"""Before the pace of a run is believed."""
_PATIENCE, _PATIENCE_S = 0.1, 60.0
"""Of the time until the deadline, how much may pass without a finished line before the run hurries, and at most so many
seconds: its pace is unknown until then, and long answers take a while.
"""
_HOPELESS = 0.5
"""Where at most this part of what is left would be done, that is said after half the usual number of ticks."""


def parse_deadline(text: str, now: datetime | None = None) -> float:
    """Seconds since 1970 of "18:30" (the next one), "2030-01-31T08:00", or "1h30m" from now.

    Raises `ConfigError`.
    """
    now = now or datetime.now()
    match = _DURATION.fullmatch(text)
    if text and match is not None:
        numbers = (int(number or 0) for number in match.groups())
        seconds = sum(number * unit for number, unit in zip(numbers, _UNITS.values(), strict=True))
        return now.timestamp() + seconds
    if re.fullmatch(r"\d{1,2}:\d{2}", text):
        hour, minute = map(int, text.split(":"))
        if hour < 24 and minute < 60:
            at = now.replace(hour=hour, minute=minute, second=0, microsecond=0)
            return (at if at > now else at + timedelta(days=1)).timestamp()
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise ConfigError(
            f"{text!r} is no time: write 18:30, 2030-01-31T08:00, or a duration as 90m or 1h30m"
        ) from None


class Pacer:
    """Looks at the pace every `TICK_S` and says what the run may cost others for it to be done in time."""

    def __init__(
        self,
        deadline: float,
        total: int,
        slowdown: float,
        say: Callable[[str], None],
        now: Callable[[], float] = time.time,
    ) -> None:
        """`slowdown` is what it may cost while there is time enough; it never goes below that."""
        self.slowdown = slowdown
        self._least = slowdown
        self._deadline = deadline
        self._total = total
        self._say = say
        self._now = now
        self._start: tuple[float, int] | None = None
        self._recent: deque[tuple[float, int]] = deque(maxlen=_RECENT)
        self._ticks_without_bound = 0
        self._was_said = False

    def tick(self, counts: Counts) -> None:
        """Change `slowdown` where the pace wants it; say, once, that it will not do."""
        now, left = self._now(), self._total - counts.finished
        self._recent.append((now, counts.finished))
        self._start = self._start or self._recent[0]
        if left <= 0 or len(self._recent) < _MIN_TICKS or self._is_patient(now):
            return
        time_left, pace = self._deadline - now, self._pace_since(*self._recent[0])
        self._adjust(pace, left / max(time_left * _RESERVE, 1e-9) if time_left > 0 else float("inf"))
        best = max(pace, self._pace_since(*self._start))  # answers may come in bursts
        in_time = best * max(time_left, 0.0)
        ticks = _RECENT // 2 if in_time < _HOPELESS * left else _RECENT
        if time_left <= 0 or (self._ticks_without_bound >= ticks and 0 < in_time < left):
            self._warn(counts.finished + in_time, time_left)

    def _is_patient(self, now: float) -> bool:
        """Whether no line has finished yet, and that says nothing."""
        assert self._start is not None
        began, before = self._start
        return self._recent[-1][1] == before and now - began < min(_PATIENCE * (self._deadline - began), _PATIENCE_S)

    def _pace_since(self, began: float, before: int) -> float:
        """Lines a second."""
        now, finished = self._recent[-1]
        return (finished - before) / max(now - began, 1e-9)

    def _adjust(self, pace: float, needed: float) -> None:
        if pace < needed:
            self.slowdown = min(NO_BOUND, 1.25 + 1.5 * (self.slowdown - 1))
        elif pace > 1.3 * needed:
            self.slowdown = max(self._least, 1 + (self.slowdown - 1) / 1.2)
        at_end = pace < needed and self.slowdown >= NO_BOUND / 20
        self._ticks_without_bound = self._ticks_without_bound + 1 if at_end else 0

    def _warn(self, by_then: float, time_left: float) -> None:
        if self._was_said:
            return
        self._was_said = True
        if time_left <= 0:
            self._say("the deadline has passed; the run goes on")
            return
        share = int(100 * by_then / self._total)
        self._say(
            f"will not be done by the deadline, in {clock(time_left)}: about {share} % will, at the whole server's pace"
        )
