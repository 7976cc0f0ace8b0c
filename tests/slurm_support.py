"""A real Slurm cluster (slurm/testcluster) for tests, and what to do with it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
SCRIPT = REPOSITORY / "slurm" / "testcluster"
UNAVAILABLE = 69
OUR_PATH = f"{REPOSITORY}:{REPOSITORY / 'kernels'}"
"""As PYTHONPATH it lets Python on a node import us where we are not installed."""

Completed = subprocess.CompletedProcess[str]


def run_script(*arguments: str, timeout_s: float) -> Completed:
    """Run slurm/testcluster to its end."""
    return subprocess.run([str(SCRIPT), *arguments], capture_output=True, text=True, timeout=timeout_s)


def prepare() -> None:
    """Install Slurm; skip, with the script's reason, only where it says that a cluster cannot run here."""
    done = run_script("prepare", timeout_s=900)
    if done.returncode == UNAVAILABLE:
        pytest.skip(f"no Slurm test cluster: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr


class Cluster:
    """A running test cluster. Commands run on the login host unless a node is named."""

    def __init__(self, run: Path):
        self.run_dir = run
        self.dead: set[str] = set()
        self.is_cut = False

    def command(self, *arguments: str, timeout_s: float = 90) -> Completed:
        """One of testcluster's own commands; fails the test if it fails."""
        done = run_script("--run", str(self.run_dir), *arguments, timeout_s=timeout_s)
        assert done.returncode == 0, f"testcluster {' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done

    def argv(self, command: Sequence[str], node: str | None = None) -> list[str]:
        where = ["exec"] if node is None else ["node", node]
        return [str(SCRIPT), "--run", str(self.run_dir), *where, *command]

    def run(self, *command: str, node: str | None = None, timeout_s: float = 60, **environ: str) -> Completed:
        """Run a command to its end, whatever its exit status."""
        return subprocess.run(
            self.argv(command, node), capture_output=True, text=True, timeout=timeout_s, env={**os.environ, **environ}
        )

    def run_python(self, *launcher: str, code: str, timeout_s: float = 60) -> list[str]:
        """The lines that a Python program prints, run by a launcher as `srun -N2`. It must succeed."""
        done = self.run(*launcher, sys.executable, "-c", code, timeout_s=timeout_s, PYTHONPATH=OUR_PATH)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    def popen(self, *command: str, node: str | None = None, **environ: str) -> subprocess.Popen[str]:
        """Start a command; stdout and stderr are one pipe."""
        return subprocess.Popen(
            self.argv(command, node),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environ},
        )

    def kill(self, node: str) -> None:
        self.dead.add(node)
        self.command("kill", node)

    def revive(self, node: str) -> None:
        self.command("revive", node)
        self.dead.discard(node)

    def cut(self, one: str, other: str) -> None:
        self.is_cut = True
        self.command("cut", one, other)

    def heal(self) -> None:
        self.command("heal")
        self.is_cut = False

    def restore(self) -> None:
        """No cuts, all nodes up, no jobs."""
        if self.is_cut:
            self.heal()
        for node in sorted(self.dead):
            self.revive(node)
        if self.has_jobs():
            self.run("scancel", "--user=root")
            wait_until(lambda: not self.has_jobs(), 30, "jobs to end")

    def has_jobs(self) -> bool:
        return bool(self.run("squeue", "-h").stdout)


def wait_until(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.1)
