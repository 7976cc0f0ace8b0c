"""Waiting without burning a core: polls that first give way, then sleep in proportion to the wait so far."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable

from fastserve_hpc.errors import RankError
from fastserve_hpc.parallel.comm import Hook, do_nothing

# A sleep of a 32nd of the wait so far makes a wait at most that much longer and needs few polls.
_SHARE_SLEPT = 1 / 32
_SHORTEST_SLEEP_S = 20e-6
_POLLS_BEFORE_ANYTHING_ELSE = 20

SPIN_S = 0.5e-3
"""Worth spinning for a partner that has a core of its own: it is mostly only microseconds late."""
SPIN_CROWDED_S = 50e-6
"""With more ranks than cores a spinning rank keeps its partner from running, and `sched_yield` hardly helps:
four ranks on two cores took 640 us for an all-reduce of 1 KB with the longer spin, 250 us with this one."""


_PR_SET_TIMERSLACK = 29
_TIMER_SLACK_NS = 1_000


def sharpen_sleeps() -> None:
    """Let short sleeps of this thread end within microseconds of their time; Linux adds 50 us otherwise."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_TIMER_SLACK_NS))


DOZE_AFTER_S = 0.25
"""A wait so long costs a core little so far; from then on it is a doze, for polling costs up to 0.5 ms a time."""
_LONGEST_DOZE_S = 1.0

Doze = Callable[[float], bool]
"""Sleeps at most so many seconds; True where it was woken because there will be work."""


class Backoff:
    """The pause between two polls: `sched_yield` for `spin_s`, then sleeps that grow up to `longest_s`.

    `reset()` when there was work. An idle loop costs 1 to 5 % of a core (the more, the busier its neighbours: every
    poll then finds cold caches), and an event after a long silence is seen within 8 ms. With `doze` it costs next to
    nothing after `DOZE_AFTER_S`, and sees an event as soon as it is woken.
    """

    def __init__(self, spin_s: float = SPIN_CROWDED_S, longest_s: float = 8e-3, doze: Doze | None = None) -> None:
        self._spin_s = spin_s
        self._longest_s = longest_s
        self._doze = doze
        self._since: float | None = None

    def reset(self) -> None:
        self._since = None

    def pause(self) -> None:
        now = time.perf_counter()
        if self._since is None:
            self._since = now
        waited = now - self._since
        if waited < self._spin_s:
            os.sched_yield()
        elif self._doze is not None and waited > DOZE_AFTER_S:
            if self._doze(_LONGEST_DOZE_S):
                self.reset()
        else:
            time.sleep(min(max(waited * _SHARE_SLEPT, _SHORTEST_SLEEP_S), self._longest_s))


class Waiter:
    """The one wait loop of the planes: polls, keeps the rest of the rank going, ends once a rank is lost.

    `check` raises `RankError` then. `spin_s`: how long a wait polls without sleeping.
    """

    def __init__(self, check: Hook = do_nothing, spin_s: float = SPIN_CROWDED_S) -> None:
        self._check = check
        self._spin_s = spin_s
        self._hook: Hook = do_nothing
        self._in_hook = False

    @property
    def is_crowded(self) -> bool:
        """Whether a wait gives its core up soon, because there are more ranks than cores."""
        return self._spin_s <= SPIN_CROWDED_S

    def set_hook(self, hook: Hook) -> None:
        self._hook = hook

    def run_hook(self) -> None:
        """Call the hook, unless this very call comes from within it."""
        if self._in_hook:
            return
        self._in_hook = True
        try:
            self._hook()
        finally:
            self._in_hook = False

    def until(self, done: Callable[[], bool], timeout_s: float | None = None, what: str = "") -> None:
        """Return once `done()`; raises `RankError` after `timeout_s`, naming `what` was waited for."""
        for _ in range(_POLLS_BEFORE_ANYTHING_ELSE):
            if done():
                return
        backoff = Backoff(self._spin_s, longest_s=1e-3)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not done():
            self._check()
            self.run_hook()
            backoff.pause()
            if deadline is not None and time.monotonic() > deadline:
                raise RankError(f"waited {timeout_s:g} s for {what}: a rank hangs or never started")
