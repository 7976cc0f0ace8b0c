"""A server of its own for a benchmark."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType

PROGRAM = [sys.executable, "-m", "fastserve_hpc"]


class RunningServer:
    """`fastserve-hpc serve` in a state directory of its own; a context manager."""

    def __init__(self, directory: Path, *args: str) -> None:
        os.environ["FASTSERVE_HPC_HOME"] = str(directory / "home")
        self.endpoint = "bench"
        self._command = [*PROGRAM, "serve", "--endpoint", self.endpoint, *args]

    def __enter__(self) -> RunningServer:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        if not any(line.startswith("ready ") for line in self._process.stdout):
            raise SystemExit(f"the server did not start: {' '.join(self._command)}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def command(self, *args: str, shows_errors: bool = False) -> str:
        """What a `fastserve-hpc` command prints; what it says on standard error may be shown as it comes."""
        errors = None if shows_errors else subprocess.PIPE
        done = subprocess.run([*PROGRAM, *args], stdout=subprocess.PIPE, stderr=errors, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(args)} ended with {done.returncode}: {(done.stderr or '')[-2000:]}")
        return done.stdout
