"""The runner of one batch file beside a server of its own: a client like any other, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from fastserve_hpc.errors import ExitCode
from fastserve_hpc.server.ingress_process import stripped
from fastserve_hpc.server.queues import DrainMode


class BatchProcess:
    """`fastserve-hpc batch` or `score` attached to this server; the server drains when it ends."""

    def __init__(self, arguments: list[str]) -> None:
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, endpoint_file: Path, on_end: Callable[[DrainMode], None]) -> None:
        """Run the file; `on_end` is called in a thread of its own."""
        command = [sys.executable, "-m", "fastserve_hpc", *self._arguments, "--endpoint", str(endpoint_file)]
        process = self._process = subprocess.Popen(command, env=stripped(os.environ))

        def wait() -> None:
            process.wait()
            on_end("finish")

        threading.Thread(target=wait, name="batch-process", daemon=True).start()

    def terminate(self) -> None:
        """Tell it to stop early; what is not finished stays for the next run."""
        if self._process is not None:
            self._process.terminate()

    def exit_code(self) -> ExitCode:
        """How it ended; to be called after the drain."""
        code = None if self._process is None else self._process.poll()
        if code is None:
            return ExitCode.STOPPED_EARLY
        return ExitCode(code) if code in ExitCode.__members__.values() else ExitCode.INTERNAL
