"""Control plane, data plane and watchdog between ranks on two nodes."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from slurm_support import REPOSITORY, Cluster

pytestmark = pytest.mark.slurm

Launcher = subprocess.Popen[str]
RANKS = REPOSITORY / "tests" / "mpi" / "ranks"
SRUN = ("srun", "-N2", "--ntasks-per-node=1", "--mpi=pmi2", "--kill-on-bad-exit=0", "--wait=0")


def run(cluster: Cluster, program: str, *arguments: str) -> str:
    command = [*SRUN, sys.executable, str(RANKS / program), *arguments]
    done = cluster.run(*command, timeout_s=100, PYTHONPATH=str(REPOSITORY), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def start_fault(cluster: Cluster, where: str, victim: int, heartbeat_s: float = 10.0) -> tuple[Launcher, str]:
    """The launcher, and the victim's process id on its node."""
    command = [*SRUN, sys.executable, str(RANKS / "faults.py"), where, str(victim), str(heartbeat_s)]
    launcher = cluster.popen(*command, PYTHONPATH=str(REPOSITORY), OMP_NUM_THREADS="1")
    assert launcher.stdout is not None
    line = launcher.stdout.readline()
    assert line.startswith("victim "), line + launcher.stdout.read()
    return launcher, line.split()[1]


def end_of(launcher: Launcher) -> str:
    """What it wrote after the line that was read. `communicate` would not see what came together with that line."""
    launcher.wait(timeout=30)
    assert launcher.stdout is not None
    return launcher.stdout.read()


def test_plans_and_hidden_states_cross_nodes(cluster: Cluster) -> None:
    assert "plans=300" in run(cluster, "control.py", "300")
    assert "mpi:1 tensors=50" in run(cluster, "stages.py", "50", "mpi:1", "torch:1")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_raising_rank_ends_the_rank_on_the_other_node(cluster: Cluster, victim: int) -> None:
    launcher, _ = start_fault(cluster, "raise", victim)
    output = end_of(launcher)
    assert re.search(rf"rank {victim} \(pid \d+ on n{victim + 1}\) failed", output)
    assert output.count("ZeroDivisionError: the test asked for it") == 1


@pytest.mark.parametrize("where", ["hidden", "plan"])
def test_a_killed_rank_ends_the_rank_on_the_other_node(cluster: Cluster, where: str) -> None:
    launcher, pid = start_fault(cluster, where, victim=0)
    cluster.run("kill", "-KILL", pid, node="n1")
    output = end_of(launcher)
    assert re.search(r"rank 0 \(pid \d+ on n1\) is lost", output)


def test_a_cut_between_the_nodes_is_noticed_on_both_sides(cluster: Cluster) -> None:
    launcher, _ = start_fault(cluster, "plan", victim=1, heartbeat_s=4.0)
    cluster.cut("n1", "n2")
    output = end_of(launcher)
    cluster.heal()
    assert re.search(r"rank 1 \(pid \d+ on n2\) is lost.*no sign of life", output)
    assert re.search(r"rank 0 \(pid \d+ on n1\) is lost.*no sign of life", output)
