"""The benchmark of an iteration names what it times by strings: they must go on naming something."""

from __future__ import annotations

import subprocess
import sys

from support import REPOSITORY


def test_every_phase_is_timed() -> None:
    command = [sys.executable, "benchmarks/iteration.py", "--sequences", "2", "--prompt", "20", "--output", "3"]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    lines = [line.rsplit(maxsplit=1) for line in result.stdout.splitlines() if line.startswith("  ")]
    times = {name.strip(): float(ms) for name, ms in lines}
    assert {"schedule", "forward", "layers", "execute, all"} <= times.keys()
    assert all(ms > 0 for ms in times.values())
