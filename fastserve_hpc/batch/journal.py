"""An append-only file of whole lines, written and synced in groups by a thread of its own.

A line is handed to the system within `WRITE_S` of `append`, and is on disk at most `SYNC_S` plus one sync later. A
process that is killed loses what it has appended in the last `WRITE_S`; a node that dies, what was not synced.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from fastserve_hpc.errors import FastServeError

WRITE_S = 0.05
SYNC_S = 1.0
GROUP_BYTES = 2**18
MAX_WAITING_BYTES = 2**24
"""`append` waits where the disk is so far behind."""


class Journal:
    """The open end of a file. `guard` is called before each write, and now and then without one; it may raise."""

    def __init__(self, path: Path, option: str, guard: Callable[[], None] = lambda: None) -> None:
        """Goes on behind what the file holds, which must end with a whole line. Raises `OSError`."""
        self._path = path
        self._name = f"{option} {path}"
        self._guard = guard
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._condition = threading.Condition()
        self._waiting: list[bytes] = []
        self._num_bytes = 0
        self._is_closing = False
        self._error: FastServeError | None = None
        self._synced = time.monotonic()
        self._is_dirty = False
        self._thread = threading.Thread(target=self._run, name=f"journal {path.name}", daemon=True)
        self._thread.start()

    def append(self, line: bytes) -> None:
        """Take a line with its end. Raises `FastServeError` if this or an earlier one cannot be written."""
        with self._condition:
            self._check()
            self._waiting.append(line)
            self._num_bytes += len(line)
            if self._num_bytes >= GROUP_BYTES:
                self._condition.notify_all()
            while self._num_bytes > MAX_WAITING_BYTES and self._error is None:
                self._condition.wait()

    def close(self) -> None:
        """Write and sync all of it. Idempotent. Raises `FastServeError` if that or anything before did not work."""
        if self._thread.is_alive():
            with self._condition:
                self._is_closing = True
                self._condition.notify_all()
        self._thread.join()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except OSError as error:
            self._fail(FastServeError(f"{self._name}: {error.strerror}; what is written stays, {AGAIN}"))
        except FastServeError as error:
            self._fail(error)

    def _fail(self, error: FastServeError) -> None:
        with self._condition:
            self._error = error
            self._waiting.clear()
            self._condition.notify_all()

    def _step(self) -> bool:
        """Write one group; whether there may be more."""
        with self._condition:
            self._condition.wait_for(lambda: self._is_closing or self._num_bytes >= GROUP_BYTES, WRITE_S)
            lines, self._waiting, self._num_bytes = self._waiting, [], 0
            is_closing = self._is_closing
            self._condition.notify_all()
        self._guard()
        if lines:
            self._write(b"".join(lines))
        if self._is_dirty and (is_closing or time.monotonic() - self._synced >= SYNC_S):
            self._sync()
        return not is_closing

    def _write(self, data: bytes) -> None:
        self._is_dirty = True
        num_written = 0
        try:
            while num_written < len(data):
                num_written += os.write(self._descriptor, data[num_written:])
        except OSError:
            torn = num_written - (data.rfind(b"\n", 0, num_written) + 1)
            with contextlib.suppress(OSError):  # the next run repairs it too
                os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - torn)
            raise

    def _sync(self) -> None:
        os.fsync(self._descriptor)
        self._is_dirty, self._synced = False, time.monotonic()
        if not self._is_in_place():
            raise FastServeError(
                f"{self._name}: the file was removed or replaced during the run, with what was in it; {AGAIN}"
            )

    def _is_in_place(self) -> bool:
        ours = os.fstat(self._descriptor)
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return False
        return (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino)


AGAIN = "run the same command again to go on"


class StandardOutput:
    """In the place of a journal: lines for another program, as soon as possible."""

    def append(self, line: bytes) -> None:
        """Raises `FastServeError`."""
        try:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
        except OSError as error:
            raise FastServeError(f"--output -: {error.strerror}") from error

    def close(self) -> None:
        """Nothing waits."""
