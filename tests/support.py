"""Shared by all tests: request factories, and real servers as subprocesses."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastserve_hpc.core.request import Request, SamplingParams

REPOSITORY = Path(__file__).resolve().parents[1]
MPIEXEC = Path(sys.executable).parent / "mpiexec"
START_TIMEOUT_S = 90.0


def create_requests(n: int, prompt_len: int = 8, max_tokens: int = 16, **sampling: Any) -> list[Request]:
    """n distinct requests with ids 0..n-1, resolved as a front end would."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0, **sampling)
    return [Request(i, tuple((7 * i + 3 * j) % 200 for j in range(prompt_len)), params) for i in range(n)]


class Server:
    """`fastserve-hpc serve` under mpiexec (or alone at world size 1), in its own state directory."""

    def __init__(
        self,
        home: Path,
        args: list[str],
        ranks: int = 1,
        env: dict[str, str] | None = None,
        launcher_args: tuple[str, ...] = (),
        program: list[str] | None = None,
    ):
        self.home = home
        self.ranks = ranks
        self.env = {**os.environ, "FASTSERVE_HPC_HOME": str(home), **(env or {})}
        self.started = time.monotonic()
        command = [*(program or [sys.executable, "-m", "fastserve_hpc"]), "serve", *args]
        launcher = [str(MPIEXEC), *launcher_args, "-n", str(ranks)] if ranks > 1 else []
        self.process = subprocess.Popen(
            [*launcher, *command], env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            self._queue.put(self.lines[-1])
        self._queue.put(None)

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for_line(self, wanted: Callable[[str], bool], timeout_s: float = START_TIMEOUT_S) -> str:
        """The first new line that is wanted; fails with the output when the server ends or time is up."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"not seen in {timeout_s} s:\n{self.output}") from None
            if line is None:
                raise AssertionError(f"the server ended ({self.process.wait()}) before:\n{self.output}")
            if wanted(line):
                return line

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> Server:
        self.wait_for_line(lambda line: line.startswith("ready "), timeout_s)
        self.start_s = time.monotonic() - self.started
        return self

    def endpoint_file(self, name: str = "default") -> Path:
        return self.home / "endpoints" / f"{name}.json"

    def status(self, *args: str) -> dict[str, Any]:
        result = self.run("status", "--json", *args)
        assert result.returncode == 0, result.stderr
        status: dict[str, Any] = json.loads(result.stdout)
        return status

    def run(self, *args: str, timeout_s: float = 60.0, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        """A fastserve-hpc command as a client of this server."""
        command = [sys.executable, "-m", "fastserve_hpc", *args]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=timeout_s, **kwargs)

    def rank_pid(self, rank: int) -> int:
        """The process of a rank (not its launcher, not the ingress)."""
        pids = [self.process.pid, *descendants(self.process.pid)]
        ranks = [p for p in pids if is_rank(p) and (self.ranks == 1 or environment(p).get("PMI_RANK") == str(rank))]
        assert len(ranks) == 1, f"{len(ranks)} processes are rank {rank}"
        return ranks[0]

    def wait(self, timeout_s: float = 30.0) -> int:
        code = self.process.wait(timeout=timeout_s)
        self._reader.join(timeout=5)
        return code

    def close(self) -> None:
        """End it: politely, then by SIGKILL to every process it started."""
        family = {pid: command_line(pid) for pid in [self.process.pid, *descendants(self.process.pid)]}
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=10)
        for pid in family:
            if is_alive(pid) and command_line(pid) == family[pid]:
                os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=10)


def descendants(pid: int) -> list[int]:
    """All processes below `pid` that exist now."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (OSError, IndexError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def environment(pid: int) -> dict[str, str]:
    """The environment that a process was started with."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def is_alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def is_rank(pid: int) -> bool:
    words = command_line(pid)
    return "serve" in words and "python" in words[0]
