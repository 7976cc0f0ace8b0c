"""`launch/gpu_check.sh` on the CPU: the same code as on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import REPOSITORY

sys.path.insert(0, str(REPOSITORY))

from launch.gpu_checks import __main__ as gpu_check
from launch.gpu_checks import checks

CPU = torch.device("cpu")


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    venv = Path(sys.executable).parents[1]
    environment = {**os.environ, "VENV": str(venv), "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", str(REPOSITORY / "launch" / "gpu_check.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)


def test_without_a_gpu_it_says_so_and_exits_2() -> None:
    result = script()
    assert result.returncode == 2, result.stderr
    assert "no GPU" in result.stdout


@pytest.mark.slow
def test_all_checks_pass_on_the_cpu_and_a_table_comes_last() -> None:
    result = script("--device", "cpu")
    assert result.returncode == 0, result.stdout + result.stderr
    table = result.stdout.splitlines()[-len(checks.ALL) :]
    assert [line.split()[:2] for line in table] == [[name, "passed"] for name in checks.ALL]


@pytest.mark.parametrize("name", ["operations", "models", "offload", "memory"])
def test_check(name: str) -> None:
    assert checks.ALL[name](CPU)


def test_what_differs_fails_its_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(checks, "_difference", lambda *_: 0.5)
    row = gpu_check.run_check("operations", lambda: checks.operations(CPU))
    assert (row.outcome, "0.5 of the largest number off" in row.detail) == ("FAILED", True)
    assert "Traceback" in capsys.readouterr().err


def test_what_is_missing_is_skipped() -> None:
    def check() -> str:
        raise checks.SkippedError("no mpi4py")

    row = gpu_check.run_check("communication", check)
    assert (row.outcome, row.detail) == ("skipped", "no mpi4py")
