"""The product in Slurm jobs: served from two nodes, asked from the login host, ended the ways Slurm ends jobs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_support import PROMPT, Cluster, Login, wait_until

pytestmark = pytest.mark.slurm

NUM_LINES = 16


@pytest.fixture
def login(cluster: Cluster, tmp_path: Path) -> Iterator[Login]:
    user = Login(cluster, tmp_path / "home")
    yield user
    user.end()


def test_fake_model_on_two_nodes(login: Login) -> None:
    job_id = login.serve("--model", "fake", "--pp", "2")
    assert login.answer(job_id) != ""
    status = login.status(job_id)
    assert (status["state"], status["model"], status["world_size"], status["pp"]) == ("ready", "fake", 2, 2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_nodes_answer_as_one_rank_does(login: Login) -> None:
    options = ("--model", "smollm2-135m", "--device-kv", "64M", "--host-kv", "16M", "--max-model-len", "1024")
    two = login.serve(*options, "--pp", "2")
    one = login.serve(*options, launcher=("srun", "-N1", "-n1", "--mpi=pmi2"))
    answer = login.answer(two)
    assert "Paris" in answer
    assert login.answer(one) == answer


def test_scancel_ends_a_server_in_order(login: Login) -> None:
    """SIGTERM reaches all ranks: no process stays, the endpoint says that it has ended."""
    job_id = login.serve("--model", "fake", "--pp", "2")
    login.cluster.run("scancel", job_id)
    output, _ = login.started[0].communicate(timeout=20)
    wait_until(lambda: not login.ranks(), 10, "the ranks to end")
    refused = login.fastserve("submit", "--raw", PROMPT, "--job", job_id)
    assert refused.returncode != 0
    assert f"the server of job {job_id} has ended" in refused.stderr, output


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_generated_server_script(login: Login, tmp_path: Path) -> None:
    """From the options to an answer, and through the warning ahead of the time limit to the end."""
    model = ("--model", "smollm2-135m", "--device-kv", "64M", "--host-kv", "16M", "--max-model-len", "1024")
    job = ("--pp", "2", "--nodes", "2", "--cpus-per-task", "2", "--time", "5", "--log", str(tmp_path / "log"))
    job_id = login.sbatch("serve", *model, *job)
    wait_until(lambda: login.status(job_id).get("state") == "ready", 60, "the server")
    assert "Paris" in login.answer(job_id)
    login.cluster.run("scancel", "--signal=USR1", "--batch", job_id)
    wait_until(lambda: not login.cluster.has_jobs(), 20, "the job to end")
    shown = login.cluster.run("scontrol", "show", "job", job_id).stdout
    assert "JobState=COMPLETED" in shown, (tmp_path / "log").read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_generated_batch_script_goes_on_after_an_early_stop(login: Login, tmp_path: Path) -> None:
    """Stopped in the middle it ends with 75, is queued again, and completes the same results."""
    prompts = [f"Item {i}: the number after {i} is" for i in range(NUM_LINES)]
    lines = [json.dumps({"custom_id": str(i), "prompt": prompt, "max_tokens": 8}) for i, prompt in enumerate(prompts)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    results = tmp_path / "out.jsonl"
    model = ("--model", "smollm2-135m", "--device-kv", "64M", "--host-kv", "16M", "--max-batch", "2")
    files = ("--input", str(tmp_path / "in.jsonl"), "--output", str(results))
    job_id = login.sbatch("batch", *model, *files, "--cpus-per-task", "2", "--log", str(tmp_path / "log"))
    wait_until(lambda: results.exists() and results.read_bytes().count(b"\n") >= 4, 60, "first results")
    login.cluster.run("scancel", "--signal=USR1", "--batch", job_id)
    wait_until(lambda: "Restarts=1" in login.cluster.run("scontrol", "show", "job", job_id).stdout, 60, "a requeue")
    assert results.read_bytes().count(b"\n") < NUM_LINES
    wait_until(lambda: not login.cluster.has_jobs(), 90, "the job to end")
    assert "JobState=COMPLETED" in login.cluster.run("scontrol", "show", "job", job_id).stdout
    records = [json.loads(line) for line in results.read_text().splitlines()]
    assert sorted(int(record["custom_id"]) for record in records) == list(range(NUM_LINES))
    assert [record["error"] for record in records] == [None] * NUM_LINES
