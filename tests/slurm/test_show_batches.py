"""Issue 5, Show 4: batch jobs that are warned, lose a node or run into their time limit, and go on."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_support import PROGRAM, Cluster, Login, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

SMALL = ("--model", "smollm2-135m", "--device-kv", "64M", "--host-kv", "16M", "--max-model-len", "1024")


class Batch:
    """A file of requests, the job that answers them, and what an uninterrupted run would have written."""

    def __init__(self, login: Login, directory: Path, num_lines: int, max_tokens: int, *model: str) -> None:
        self.login = login
        self.model = model
        self.num_lines = num_lines
        self.directory = directory
        self.results = directory / "out.jsonl"
        prompts = [f"Item {i}: the number after {i} is" for i in range(num_lines)]
        fields = {"max_tokens": max_tokens, "ignore_eos": True}
        lines = [json.dumps({"custom_id": str(i), "prompt": p, **fields}) for i, p in enumerate(prompts)]
        (directory / "in.jsonl").write_text("\n".join(lines) + "\n")
        self.job_id = ""

    def submit(self, *options: str) -> None:
        files = ("--input", str(self.directory / "in.jsonl"), "--output", str(self.results))
        job = ("--cpus-per-task", "2", "--log", str(self.log), *options)
        self.job_id = self.login.sbatch("batch", *self.model, *files, *job)

    @property
    def log(self) -> Path:
        return self.directory / "log"

    @property
    def num_done(self) -> int:
        return self.results.read_bytes().count(b"\n") if self.results.exists() else 0

    def shown(self) -> str:
        return self.login.cluster.run("scontrol", "show", "job", self.job_id).stdout

    def wait_for_lines(self, count: int) -> None:
        wait_until(lambda: self.num_done >= count, 120, f"{count} results")

    def wait_for_restart(self) -> None:
        wait_until(lambda: "Restarts=0" not in self.shown(), 90, "a requeue")

    def wait_completed(self, timeout_s: float = 240) -> None:
        wait_until(lambda: not self.login.cluster.has_jobs(), timeout_s, "the job to end")
        assert "JobState=COMPLETED" in self.shown(), self.log.read_text()

    def answers(self, path: Path) -> dict[str, str]:
        """By line; no line twice, none missing, none failed."""
        records = [json.loads(line) for line in path.read_text().splitlines()]
        assert sorted(int(r["custom_id"]) for r in records) == list(range(self.num_lines))
        assert [r["error"] for r in records] == [None] * self.num_lines
        return {r["custom_id"]: json.dumps(r["response"]["body"]["choices"]) for r in records}

    def assert_as_uninterrupted(self) -> None:
        whole = self.directory / "whole.jsonl"
        files = ("--input", str(self.directory / "in.jsonl"), "--output", str(whole))
        done = self.login.cluster.run(*PROGRAM, "batch", *self.model, *files, timeout_s=240, **self.login.environ)
        assert done.returncode == 0, done.stderr
        assert self.answers(self.results) == self.answers(whole)


@pytest.fixture
def login(cluster: Cluster, tmp_path: Path) -> Iterator[Login]:
    user = Login(cluster, tmp_path / "home")
    yield user
    user.end()


def warn(login: Login, job_id: str) -> None:
    login.cluster.run("scancel", "--signal=USR1", "--batch", job_id)


def test_show_4_a_warned_batch_job_goes_on_in_a_second_run(login: Login, tmp_path: Path) -> None:
    batch = Batch(login, tmp_path, 100, 100, "--model", "fake", "--max-batch", "2")
    batch.submit()
    batch.wait_for_lines(5)
    warn(login, batch.job_id)
    batch.wait_for_restart()
    assert batch.num_done < batch.num_lines
    batch.wait_completed()
    assert "run the same command again" in batch.log.read_text()
    batch.assert_as_uninterrupted()


@pytest.mark.slow
def test_show_4_with_a_real_model(login: Login, tmp_path: Path) -> None:
    batch = Batch(login, tmp_path, 24, 16, *SMALL, "--max-batch", "2")
    batch.submit()
    batch.wait_for_lines(6)
    warn(login, batch.job_id)
    batch.wait_for_restart()
    assert batch.num_done < batch.num_lines
    batch.wait_completed()
    batch.assert_as_uninterrupted()


@pytest.mark.slow
def test_show_4_with_a_node_powered_off_in_the_middle(login: Login, tmp_path: Path) -> None:
    batch = Batch(login, tmp_path, 60, 24, *SMALL, "--max-batch", "2")
    batch.submit("--pp", "2", "--nodes", "2")
    batch.wait_for_lines(6)
    login.cluster.kill("n2")
    login.cluster.revive("n2")
    batch.wait_for_restart()
    assert batch.num_done < batch.num_lines
    batch.wait_completed()
    batch.model = (*batch.model, "--pp", "1")
    batch.assert_as_uninterrupted()


# The fake model, taking its time; --env makes it the program of a job.
SLOW = """
from functools import partial
from fastserve_hpc.boot import workers
from fastserve_hpc.cli import main
workers.FakeWorker = partial(workers.FakeWorker, delay_s=0.02)
main()
"""


@pytest.mark.slow
def test_show_4_with_a_time_limit_of_one_minute(login: Login, tmp_path: Path) -> None:
    """Work for 80 s: the warning comes, or the server knows by itself; the job is queued again until all is done."""
    (tmp_path / "slow.py").write_text(SLOW)
    program = tmp_path / "fastserve-hpc"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/slow.py "$@"\n')
    program.chmod(0o755)
    (tmp_path / "env.sh").write_text(f"PATH={tmp_path}:$PATH\n")
    batch = Batch(login, tmp_path, 160, 100, "--model", "fake", "--max-batch", "4", "--policy", "fcfs")
    batch.submit("--time", "1", "--env", str(tmp_path / "env.sh"))
    batch.wait_for_restart()
    assert 0 < batch.num_done < batch.num_lines
    batch.wait_completed(timeout_s=500)
    assert "DUE TO TIME LIMIT" not in batch.log.read_text()
    batch.assert_as_uninterrupted()
