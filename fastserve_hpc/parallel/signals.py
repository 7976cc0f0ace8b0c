"""Signals, taken by a thread of their own: a Python handler does not run while the main thread is inside MPI."""

from __future__ import annotations

import enum
import signal
import threading
import time
from collections.abc import Callable

_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGUSR1})

# A terminal and a launcher may both pass on the same key stroke; a person presses twice more slowly.
_SAME_STROKE_S = 0.25


class Stop(enum.Enum):
    """What a signal asks of the server."""

    DRAIN = enum.auto()
    """Take no new requests, finish the running ones, then leave."""
    DRAIN_SOON = enum.auto()
    """The same; but who sends SIGTERM (Slurm's scancel) kills a little later."""
    NOW = enum.auto()
    """Leave at once."""


def block_signals() -> None:
    """Hold back SIGTERM, SIGINT and SIGUSR1 for `SignalThread`.

    To be called in the main thread before torch, zmq or MPI start threads, which inherit it. Child processes
    inherit it too: one that wants its signals calls `unblock_signals` first thing.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def unblock_signals() -> None:
    """Undo `block_signals` in this thread; the first act of a child process that wants to be stopped by signals."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


class SignalThread(threading.Thread):
    """Waits for signals and calls `on_stop` in this thread; `block_signals` must have been called.

    The first signal asks to drain (SIGUSR1 is Slurm's warning ahead of the time limit); a SIGTERM or SIGINT after that
    asks to stop now.
    """

    def __init__(self, on_stop: Callable[[Stop], None]) -> None:
        super().__init__(name="signals", daemon=True)
        self._on_stop = on_stop
        self._draining_since: float | None = None

    def run(self) -> None:
        while True:
            stop = self._meaning(signal.sigwait(_SIGNALS), time.monotonic())
            if stop is not None:
                self._on_stop(stop)

    def _meaning(self, number: int, now: float) -> Stop | None:
        if self._draining_since is None:
            self._draining_since = now
            return Stop.DRAIN_SOON if number == signal.SIGTERM else Stop.DRAIN
        is_repeat = number == signal.SIGUSR1 or now - self._draining_since < _SAME_STROKE_S
        return None if is_repeat else Stop.NOW
