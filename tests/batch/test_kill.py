"""Batch runs that are killed, stopped or torn at random, and gone on with until they are done."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def kill_runs(directory: Path, num_runs: int, seed: int, timeout_s: float) -> int:
    """How often a run was left in the middle."""
    command = [sys.executable, str(HERE / "kill_runs.py"), str(directory), str(num_runs), str(seed)]
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    match = re.search(rf"^{num_runs} runs, (\d+) times left in the middle$", done.stdout, re.MULTILINE)
    assert match, done.stdout
    return int(match[1])


def test_every_line_exactly_once_after_kills_and_cuts(tmp_path: Path) -> None:
    assert kill_runs(tmp_path, 25, seed=1, timeout_s=100) >= 15


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_line_exactly_once_after_many_kills_and_cuts(tmp_path: Path) -> None:
    assert kill_runs(tmp_path, 250, seed=2, timeout_s=550) >= 150
