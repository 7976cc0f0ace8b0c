"""Waiting without burning a core: polls that first give way, then sleep in proportion to the wait so far."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from fastserve_hpc.errors import RankError
from fastserve_hpc.parallel.comm import Hook, do_nothing

# A sleep of a sixteenth of the wait so far makes a wait at most that much longer and needs few polls.
_SHARE_SLEPT = 1 / 16
_SHORTEST_SLEEP_S = 20e-6


class Backoff:
    """The pause between two polls: `sched_yield` for `spin_s`, then sleeps that grow up to `longest_s`.

    `reset()` when there was work. With the defaults an idle loop costs about 1 % of a core, and an
    event after a long silence is seen within 4 ms.
    """

    def __init__(self, spin_s: float = 0.5e-3, longest_s: float = 4e-3) -> None:
        self._spin_s = spin_s
        self._longest_s = longest_s
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
        else:
            time.sleep(min(max(waited * _SHARE_SLEPT, _SHORTEST_SLEEP_S), self._longest_s))


class Waiter:
    """The one wait loop of the data plane: polls, keeps the rest of the rank going, ends once a rank is lost.

    `check` raises `RankError` then. Polls spin first because a tensor-parallel partner is mostly only microseconds
    late; they give the core away between polls because there may be more ranks than cores.
    """

    def __init__(self, check: Hook = do_nothing, spins: int = 20) -> None:
        self._check = check
        self._spins = spins
        self._hook: Hook = do_nothing
        self._in_hook = False

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
        for _ in range(self._spins):
            if done():
                return
        backoff = Backoff(spin_s=2e-3, longest_s=1e-3)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not done():
            self._check()
            self.run_hook()
            backoff.pause()
            if deadline is not None and time.monotonic() > deadline:
                raise RankError(f"waited {timeout_s:g} s for {what}: a rank hangs or never started")
