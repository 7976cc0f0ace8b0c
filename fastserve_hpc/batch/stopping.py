"""Stop signals of a batch run: the first one ends it in good order, later ones change nothing."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from fastserve_hpc.errors import StoppedError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """A context, for the main thread. Launchers and terminals send several signals for one wish.

    One handler for the whole of it: between two handlers a signal would kill, or raise where nobody expects it.
    """

    def __init__(self) -> None:
        self._was_told = False
        self._act: Callable[[], None] = _raise
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        self._before = {number: signal.signal(number, self._take) for number in _SIGNALS}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)  # rank 0 starts this process with them blocked
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # A second signal must not change the exit status of a process that ends because of the first.
            signal.signal(number, signal.SIG_IGN if self._was_told else handler)

    def interrupt(self) -> None:
        """From now on, as in the beginning, the first signal raises `StoppedError` wherever the main thread is."""
        self._act = _raise

    def ignore(self) -> None:
        """What follows is short and must not be interrupted."""
        self._act = _nothing

    def cancel(self, task: asyncio.Task[Any]) -> None:
        """From now on the first signal cancels a task of the running loop."""
        loop = asyncio.get_running_loop()

        def stop() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: so has the task
                loop.call_soon_threadsafe(task.cancel)

        self._act = stop

    def _take(self, _number: int, _frame: FrameType | None) -> None:
        if not self._was_told:
            self._was_told = True
            self._act()


def _raise() -> None:
    raise StoppedError("told to stop; run the same command again to go on")


def _nothing() -> None:
    pass
