"""Starting MPI: what hangs or does not match is named."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

pytestmark = pytest.mark.mpi


def test_a_late_rank_is_named_and_waited_for(mpi_run):
    output = mpi_run(2, "stuck_init.py", "late")
    assert output.count("has not returned for 1 s") == 1
    assert "srun --mpi=pmi2" in output


def test_an_mpi_init_that_never_returns_is_given_up(mpi_command, mpi_environment):
    command = mpi_command(2, "stuck_init.py", "never")
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=20, env=mpi_environment
    )
    assert result.returncode != 0
    assert "is given up" in result.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stuck_mpi_init_can_be_stopped(number, mpi_command, mpi_environment):
    """The lock that it holds keeps every handler and thread from acting."""
    command = mpi_command(2, "stuck_init.py", "stay")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=mpi_environment
    ) as p:
        assert "has not returned" in p.stdout.readline()
        os.kill(rank_of(p.pid), number)
        assert p.wait(timeout=10) != 0
        assert "does not return, and the process was told to stop" in p.stdout.read()


def rank_of(launcher):
    """The process of rank 0 under a launcher."""
    ranks = [c for c in psutil.Process(launcher).children(recursive=True) if "stuck_init.py" in " ".join(c.cmdline())]
    return next(rank.pid for rank in ranks if rank.environ()["PMI_RANK"] == "0")


def test_mpi_starts_no_thread_that_takes_signals(mpi_run):
    assert mpi_run(2, "signal_masks.py").count("blocked in all threads") == 2


@pytest.mark.parametrize("environ", [{"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}, {"PMIX_RANK": "0"}])
def test_a_launcher_that_mpi_does_not_see_is_named_with_the_cure(environ, mpi_environment):
    code = "from fastserve_hpc.parallel.mpi_init import init_mpi; print(init_mpi().size)"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, env={**mpi_environment, **environ})
    assert "ConfigError" in result.stderr
    assert "srun --mpi=pmi2" in result.stderr


def test_importing_the_mpi_modules_does_not_start_mpi(mpi_environment):
    code = (
        "import fastserve_hpc.parallel.mpi_comm, fastserve_hpc.parallel.mpi_control\n"
        "from mpi4py import MPI; print(MPI.Is_initialized())"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=mpi_environment)
    assert result.stdout == "False\n", result.stderr
