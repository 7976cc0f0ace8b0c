"""What processes and the machine use, from /proc: processor time, memory, and how busy others keep the machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def family(pid: int) -> list[int]:
    """The process and all below it that exist now."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        found.append(todo.pop())
        todo += children.get(found[-1], [])
    return found


def cpu_s(pid: int) -> float:
    """Processor seconds that a process has used so far; 0 when it is gone."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S if fields else 0.0


def peak_rss_bytes(pid: int) -> int:
    """The most memory that a process has had resident; 0 when it is gone."""
    try:
        lines = (_PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def role(pid: int) -> str | None:
    """What a process of a server is: "rank 0", "ingress"; None for launchers and others."""
    words = _strings(pid, "cmdline")
    if "fastserve_hpc.server.ingress" in words:
        return "ingress"
    if "serve" not in words or "python" not in words[0]:
        return None
    environment = dict(entry.split("=", 1) for entry in _strings(pid, "environ") if "=" in entry)
    return f"rank {environment.get('PMI_RANK', '0')}"


class OthersWatch:
    """How many cores are busy with something else than this process and its descendants, since it was made."""

    def __init__(self) -> None:
        self._began, self._before = time.monotonic(), self._others_s()

    def busy_cores(self) -> float:
        """At most all of them, however short the time: the kernel counts in ticks of 10 ms."""
        elapsed = max(time.monotonic() - self._began, 1e-3)
        return min(max(0.0, (self._others_s() - self._before) / elapsed), float(os.cpu_count() or 1))

    def _others_s(self) -> float:
        ticks = [int(word) for word in (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]]
        idle = ticks[3] + ticks[4]
        return (sum(ticks) - idle) / _TICKS_PER_S - sum(map(cpu_s, family(os.getpid())))


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _strings(pid: int, name: str) -> list[str]:
    try:
        return (_PROC / str(pid) / name).read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return [""]
