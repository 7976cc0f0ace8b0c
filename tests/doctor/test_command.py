"""`fastserve-hpc doctor` alone and under mpiexec."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import MPIEXEC

COMMAND = [sys.executable, "-m", "fastserve_hpc", "doctor"]


def doctor(*arguments: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    launcher = [str(MPIEXEC), "-n", str(ranks)] if ranks > 1 else []
    return subprocess.run([*launcher, *COMMAND, *arguments], capture_output=True, text=True, timeout=60)


def test_alone() -> None:
    done = doctor("--model", "fake")
    assert done.returncode == 0, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()[1:3]] == [["ok", "world"], ["ok", "versions"]]


def test_missing_model_ends_with_2(tmp_path: Path) -> None:
    done = doctor("--json", "--model", str(tmp_path / "gone"))
    assert done.returncode == 2
    findings = [json.loads(line) for line in done.stdout.splitlines()]
    [error] = [finding for finding in findings if finding["level"] == "error"]
    assert error["check"] == "model"
    assert "gone" in error["value"]


@pytest.mark.mpi
def test_three_ranks_of_one_stage() -> None:
    done = doctor("--json", "--model", "fake", "--tp", "3", ranks=3)
    assert done.returncode == 0, done.stdout + done.stderr
    values = [json.loads(line)["value"] for line in done.stdout.splitlines()]
    assert "3 ranks, --tp 3 x --pp 1" in values
    assert any(value.startswith("6, at worst") for value in values)  # each of three ranks to two others
    assert any(value.startswith("all-reduce of 4 KiB") for value in values)


@pytest.mark.mpi
def test_a_wrong_number_of_ranks_is_said_once_and_quickly() -> None:
    began = time.monotonic()
    done = doctor("--model", "fake", "--pp", "3", ranks=2)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout.count("start with -n 3") == 1
    assert time.monotonic() - began < 15


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("first", "second", "difference"),
    [
        (("--tp", "2"), ("--pp", "2"), "--tp 1 (rank 0: 2), --pp 2 (rank 0: 1)"),
        (("--pp", "2"), ("--pp", "2", "--block-size", "32"), "--block-size 32 (rank 0: 16)"),
    ],
)
def test_ranks_with_different_options_are_told_apart(
    first: tuple[str, ...], second: tuple[str, ...], difference: str
) -> None:
    """As serve would meet them: it would come up and wait for ever, or for the links to time out."""
    command = [*COMMAND, "--model", "fake"]
    began = time.monotonic()
    done = subprocess.run(
        [str(MPIEXEC), "-n", "1", *command, *first, ":", "-n", "1", *command, *second],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert difference in " ".join(done.stdout.split())
    assert time.monotonic() - began < 15
