"""Runs small programs under mpiexec; each says on its own ranks what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RANKS = Path(__file__).parent / "ranks"
MPIEXEC = Path(sys.executable).parent / "mpiexec"


@pytest.fixture
def mpi_command():
    """The command line of `program` (a file in ranks/) on n ranks."""

    def command(n, program, *arguments, launcher_args=()):
        return [MPIEXEC, *launcher_args, "-n", str(n), sys.executable, RANKS / program, *map(str, arguments)]

    return command


@pytest.fixture
def mpi_run(mpi_command):
    """Run `program` on n ranks to its end and return its output; it must exit with 0 within `timeout` seconds."""

    def run(n, program, *arguments, timeout=100):
        result = subprocess.run(
            mpi_command(n, program, *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=timeout,
            env=mpi_environment(),
        )
        assert result.returncode == 0, result.stdout
        return result.stdout

    return run


@pytest.fixture(name="mpi_environment")
def mpi_environment_fixture():
    return mpi_environment()


def mpi_environment():
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
