"""Stop signals of a batch run: the first one ends it in good order, later ones change nothing."""

from __future__ import annotations

import asyncio
import signal
from types import FrameType, TracebackType
from typing import Any

from fastserve_hpc.errors import StoppedError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """A context, for the main thread. Launchers and terminals send several signals for one wish."""

    def __init__(self) -> None:
        self.was_told = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        self._before = {number: signal.getsignal(number) for number in _SIGNALS}
        self.listen()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)  # rank 0 starts this process with them blocked
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def listen(self) -> None:
        """From now on the first signal raises `StoppedError` wherever the main thread is."""
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN if self.was_told else self._raise)

    def ignore(self) -> None:
        """What follows is short and must not be interrupted."""
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def cancel(self, task: asyncio.Task[Any]) -> None:
        """From now on the first signal cancels a task of the running loop."""
        loop = asyncio.get_running_loop()

        def stop() -> None:
            if not self.was_told:
                self.was_told = True
                task.cancel()

        for number in _SIGNALS:
            loop.add_signal_handler(number, stop)

    def _raise(self, _number: int, _frame: FrameType | None) -> None:
        self.was_told = True
        self.ignore()
        raise StoppedError("told to stop; run the same command again to go on")
