"""Scripts in a real Slurm: what becomes of their values, of signals, and of work that is left over."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from slurm_support import OUR_PATH, Cluster, wait_until

from fastserve_hpc.slurm.script import Option, Script, Shard, directive, render

pytestmark = pytest.mark.slurm

HOSTILE = ("it's", 'say "hi"', "back\\slash\\", "$(touch pwned)", "a # b", "#", "a=b,c", "ünï ☃", "`x`; y", "a b", "''")

# Stands for `fastserve-hpc batch`: writes a line a start, stops early when told to, is done the second time.
PROGRAM = """
import os, pathlib, signal, sys, time
log = pathlib.Path(sys.argv[1], os.environ["SLURM_PROCID"])
def say(text):
    with log.open("a") as file:
        file.write(text + "\\n")
def stop(number, _):
    say(signal.Signals(number).name)
    sys.exit(75)
signal.signal(signal.SIGUSR1, stop)
signal.signal(signal.SIGTERM, stop)
say("start " + " ".join(sys.argv[2:]))
if os.environ.get("SLURM_RESTART_COUNT"):
    sys.exit(0)
time.sleep(60)
"""


def script(tmp_path: Path, *directives: Option, shards: tuple[Shard, ...] = ()) -> str:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    settings = (("nodes", "2"), ("ntasks-per-node", "1"), ("cpus-per-task", "2"), ("time", "5"), ("requeue", None))
    return render(
        Script(
            directives=(*settings, ("output", str(tmp_path / "log-%a")), *directives),
            env_file=None,
            srun=(("mpi", "pmi2"), ("distribution", "block")),
            program=(sys.executable, str(program)),
            command=str(tmp_path),
            options=(),
            shards=shards,
            restarts=True,
        )
    )


def submit(cluster: Cluster, tmp_path: Path, text: str) -> str:
    (tmp_path / "job").write_text(text)
    done = cluster.run("sbatch", "--parsable", str(tmp_path / "job"))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def lines(tmp_path: Path, rank: int) -> list[str]:
    path = tmp_path / str(rank)
    return path.read_text().splitlines() if path.exists() else []


def state(cluster: Cluster, job_id: str) -> str:
    fields = cluster.run("scontrol", "--oneliner", "show", "job", job_id).stdout.split()
    return next(field.partition("=")[2] for field in fields if field.startswith("JobState="))


def test_values_of_directives_arrive_unchanged(cluster: Cluster, tmp_path: Path) -> None:
    for i, value in enumerate(HOSTILE):
        (tmp_path / str(i)).write_text(f"#!/bin/bash\n#SBATCH --hold\n{directive('comment', value)}\n")
    submit_all = f"cd {tmp_path}; for i in $(seq 0 {len(HOSTILE) - 1}); do sbatch --parsable $i; done"
    job_ids = cluster.run("bash", "-c", submit_all).stdout.split()
    rows = cluster.run("squeue", "--noheader", "--format=%i %k").stdout.splitlines()
    assert dict(row.split(" ", 1) for row in rows) == dict(zip(job_ids, HOSTILE, strict=True))


def test_warning_ahead_of_the_time_limit_leads_to_a_second_run(cluster: Cluster, tmp_path: Path) -> None:
    job_id = submit(cluster, tmp_path, script(tmp_path))
    wait_until(lambda: lines(tmp_path, 0) and lines(tmp_path, 1), 20, "the ranks to start")
    cluster.run("scancel", "--signal=USR1", "--batch", job_id)
    wait_until(lambda: state(cluster, job_id) == "COMPLETED", 40, "the second run")
    assert lines(tmp_path, 0) == lines(tmp_path, 1) == ["start ", "SIGUSR1", "start "]


def test_scancel_ends_a_job_for_good(cluster: Cluster, tmp_path: Path) -> None:
    job_id = submit(cluster, tmp_path, script(tmp_path))
    wait_until(lambda: lines(tmp_path, 0) and lines(tmp_path, 1), 20, "the ranks to start")
    cluster.run("scancel", job_id)
    wait_until(lambda: state(cluster, job_id) == "CANCELLED", 10, "the job to end")
    assert lines(tmp_path, 0) == lines(tmp_path, 1) == ["start ", "SIGTERM"]
    assert not cluster.has_jobs()


def test_where_requeueing_is_refused_a_successor_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    """And it starts only after the first has ended."""
    job_id = submit(cluster, tmp_path, script(tmp_path, ("no-requeue", None)))
    wait_until(lambda: lines(tmp_path, 0) and lines(tmp_path, 1), 20, "the ranks to start")
    (tmp_path / "program.py").write_text(PROGRAM.replace('os.environ.get("SLURM_RESTART_COUNT")', "True"))
    cluster.run("scancel", "--signal=USR1", "--batch", job_id)
    wait_until(lambda: len(lines(tmp_path, 0)) == 3, 30, "the successor")
    assert lines(tmp_path, 0) == ["start ", "SIGUSR1", "start "]
    successor = str(int(job_id) + 1)
    wait_until(lambda: state(cluster, successor) == "COMPLETED", 20, "its end")
    assert state(cluster, job_id) == "FAILED"


@pytest.mark.slow
def test_node_failure_leads_to_a_second_run(cluster: Cluster, tmp_path: Path) -> None:
    job_id = submit(cluster, tmp_path, script(tmp_path))
    wait_until(lambda: lines(tmp_path, 0) and lines(tmp_path, 1), 20, "the ranks to start")
    cluster.kill("n2")
    cluster.revive("n2")
    wait_until(lambda: state(cluster, job_id) == "COMPLETED", 60, "the second run")
    assert lines(tmp_path, 1) == ["start ", "start "]


def test_an_array_runs_a_file_each(cluster: Cluster, tmp_path: Path) -> None:
    shards = (Shard("a b", "x"), Shard("c", "y"))
    done_at_once = script(tmp_path, ("array", "0-1"), shards=shards).replace("set -u", "export SLURM_RESTART_COUNT=1")
    job_id = submit(cluster, tmp_path, done_at_once)
    wait_until(lambda: len(lines(tmp_path, 0)) == len(lines(tmp_path, 1)) == 2, 30, "both elements")
    assert sorted(lines(tmp_path, 0)) == ["start --input=a b --output=x", "start --input=c --output=y"]
    wait_until(lambda: not cluster.has_jobs(), 20, job_id)


def test_the_command_submits(cluster: Cluster, tmp_path: Path) -> None:
    """`--test-only` and `--submit` on the login host, from the options to a job in the queue."""
    command = [sys.executable, "-m", "fastserve_hpc", "sbatch", "serve", "--sbatch-option", "hold", "--log"]
    command.append(str(tmp_path / "log"))
    assert cluster.run(*command, "--test-only", PYTHONPATH=OUR_PATH).stdout == "sbatch would take it\n"
    assert not cluster.has_jobs()
    done = cluster.run(*command, "--submit", PYTHONPATH=OUR_PATH)
    job_id = cluster.run("squeue", "--noheader", "--format=%i %j").stdout.split()
    assert job_id[1] == "fastserve-smollm2-135m"
    assert done.stdout.startswith(f"submitted job {job_id[0]};")
    refused = cluster.run(*command, "--submit", "--partition=nowhere", PYTHONPATH=OUR_PATH)
    assert refused.returncode == 1
    assert "error: sbatch refused the script: invalid partition specified: nowhere" in refused.stderr
