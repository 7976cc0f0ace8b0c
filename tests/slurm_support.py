"""A real Slurm cluster (slurm/testcluster) for tests, and what to do with it."""

from __future__ import annotations

import json
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


PROGRAM = (sys.executable, "-m", "fastserve_hpc")
SRUN = ("srun", "-N2", "--ntasks-per-node=1", "--mpi=pmi2")
PROMPT = "The capital of France is"


class Login:
    """A user on the login host, whose home all nodes share."""

    def __init__(self, cluster: Cluster, home: Path):
        self.cluster = cluster
        self.environ = {"PYTHONPATH": OUR_PATH, "FASTSERVE_HPC_HOME": str(home), "OMP_NUM_THREADS": "1"}
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *command: str) -> subprocess.Popen[str]:
        process = self.cluster.popen(*command, **self.environ)
        self.started.append(process)
        return process

    def fastserve(self, *arguments: str, timeout_s: float = 60) -> Completed:
        return self.cluster.run(*PROGRAM, *arguments, timeout_s=timeout_s, **self.environ)

    def serve(self, *arguments: str, launcher: tuple[str, ...] = SRUN) -> str:
        """Start a server; returns the job's id once it is ready."""
        process = self.start(*launcher, *PROGRAM, "serve", *arguments)
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("ready endpoint=job-"):
                return line.split()[1].removeprefix("endpoint=job-")
        raise AssertionError("".join(lines))

    def status(self, job_id: str) -> dict[str, object]:
        done = self.fastserve("status", "--json", "--job", job_id)
        return dict(json.loads(done.stdout)) if done.returncode == 0 else {}

    def sbatch(self, *arguments: str) -> str:
        """Submit what `fastserve-hpc sbatch` makes of the arguments; returns the job's id."""
        done = self.fastserve("sbatch", *arguments, "--submit")
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[2].rstrip(",;")

    def ranks(self) -> list[str]:
        """Process ids of what runs of us on the nodes."""
        found = (self.cluster.run("pgrep", "-f", "fastserve_hpc", node=node).stdout for node in ("n1", "n2"))
        return "".join(found).split()

    def end(self) -> None:
        """No jobs, and nothing that was started is left."""
        self.cluster.run("scancel", "--user=root")
        for process in self.started:
            process.communicate(timeout=60)

    def answer(self, job_id: str) -> str:
        done = self.fastserve("submit", "--raw", PROMPT, "--job", job_id, "--max-tokens", "8")
        assert done.returncode == 0, done.stderr
        return done.stdout
