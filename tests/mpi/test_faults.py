"""A rank that dies, stops or raises ends all ranks, wherever they wait for it; the launcher keeps out of it."""

import os
import re
import signal
import subprocess
import time

import pytest

pytestmark = pytest.mark.mpi


@pytest.fixture
def start(mpi_command, mpi_environment):
    """Starts ranks that wait for a victim; returns the launcher and the victim's pid."""
    started = []

    def start_ranks(where, victim, heartbeat_s=10.0, n=2):
        command = mpi_command(n, "faults.py", where, victim, heartbeat_s, launcher_args=["-disable-auto-cleanup"])
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        launcher = subprocess.Popen(command, **pipes, text=True, env=mpi_environment)
        started.append(launcher)
        line = launcher.stdout.readline()
        assert line.startswith("victim "), line + launcher.stdout.read()
        return launcher, int(line.split()[1])

    yield start_ranks
    for launcher in started:
        launcher.kill()
        launcher.communicate()


def end_of(launcher, timeout):
    launcher.wait(timeout)
    return launcher.stdout.read()  # `communicate` would not see what came together with the line that was read


@pytest.mark.parametrize(
    ("where", "victim"), [("plan", 0), ("plan", 1), ("hidden", 0), ("sum", 0), ("sum", 1), ("end", 1)]
)
def test_a_killed_rank_ends_the_others(start, where, victim):
    launcher, pid = start(where, victim)
    time.sleep(0.3)
    os.kill(pid, signal.SIGKILL)
    output = end_of(launcher, timeout=5)
    ours = rf"fastserve-hpc: rank {victim} \(pid {pid} on \S+\) is lost, all ranks end: its connection closed"
    assert re.search(ours, output) or "Killed (signal 9)" in output  # on a busy machine the launcher may be first
    assert launcher.returncode != 0


def test_a_stopped_rank_ends_the_others_within_the_heartbeat(start):
    launcher, pid = start("sum", victim=1, heartbeat_s=2.0, n=3)
    os.kill(pid, signal.SIGSTOP)
    assert "is lost, all ranks end: no sign of life" in launcher.stdout.readline()
    os.kill(pid, signal.SIGCONT)
    end_of(launcher, timeout=5)
    assert launcher.returncode != 0


@pytest.mark.parametrize("victim", [0, 1])
def test_a_raising_rank_ends_the_others_with_its_traceback(start, victim):
    launcher, pid = start("raise", victim)
    output = end_of(launcher, timeout=8)
    assert f"rank {victim} (pid {pid}" in output
    assert output.count("Traceback") == 1
    assert "ZeroDivisionError: the test asked for it" in output
    assert launcher.returncode == 1
