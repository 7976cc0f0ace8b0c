"""Issue 5: what a network between two stages costs (Show 1), and tensor-parallel stages in float32 (Shows 1 and 6)."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_support import PROGRAM, Cluster, Login, wait_until
from weights_read import bytes_needed_by_stage, bytes_read, watched

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1200)]

MODEL = ("--model", "smollm2-135m", "--device-kv", "320M", "--host-kv", "16M", "--max-model-len", "1024")
# Both ways each rank has one core, and the same one: the nodes of the test cluster share all of them. And a session:
# Linux shares a core out by sessions, and the ranks of a node have one together.
BOUND = ("sh", "-c", 'exec setsid --wait taskset -c "$SLURM_PROCID" "$@"', "sh")
NUM_REQUESTS = 64
WINDOW_S = 60.0


@pytest.fixture
def login(cluster: Cluster, tmp_path: Path) -> Iterator[Login]:
    user = Login(cluster, tmp_path / "home")
    yield user
    user.end()


def output_tokens(login: Login, job_id: str) -> int:
    watching = f"from fastserve_hpc.client import Client; print(Client(job={job_id!r}).status().output_tokens)"
    return int(login.cluster.run(sys.executable, "-c", watching, **login.environ).stdout)


def test_show_1_pp_2_over_tcp_is_nearly_as_fast_as_on_one_host(login: Login, tmp_path: Path) -> None:
    """64 requests of 128 and 64 tokens at once (w1), on both servers at the same time and on the same two cores: what
    else runs on the machine slows both alike. Counted is what each has answered while both were answering."""
    trace = tmp_path / "w1.jsonl"
    trace.write_text('{"arrival_s": 0, "prompt_tokens": 128, "output_tokens": 64}\n' * NUM_REQUESTS)
    two_nodes = login.serve(*MODEL, "--pp", "2", launcher=("srun", "-N2", "-n2", "--mpi=pmi2", *BOUND))
    one_host = login.serve(*MODEL, "--pp", "2", launcher=("srun", "-N1", "-n2", "--mpi=pmi2", *BOUND))
    jobs = (two_nodes, one_host)
    for job in jobs:
        login.start(*PROGRAM, "bench", "--job", job, "--trace", str(trace), "--offline", "--json")
    wait_until(lambda: all(output_tokens(login, job) > NUM_REQUESTS for job in jobs), 500, "both to answer")
    before, began = [output_tokens(login, job) for job in jobs], time.monotonic()
    last = 64 * NUM_REQUESTS
    wait_until(
        lambda: time.monotonic() - began > WINDOW_S or any(output_tokens(login, job) >= last for job in jobs),
        2 * WINDOW_S,
        "some answers",
    )
    over_tcp, inside = (output_tokens(login, job) - then for job, then in zip(jobs, before, strict=True))
    ratio = over_tcp / inside
    print(f"tokens in {time.monotonic() - began:.0f} s: {over_tcp} over TCP, {inside} on one host: {ratio:.2f}")
    assert ratio >= 0.8


def test_show_1_and_6_tp_3_x_pp_2_in_float32(login: Login, tmp_path: Path) -> None:
    """The tokens of one process; and three ranks of a node read together what the node needs."""
    (tmp_path / "traces").mkdir()
    login.environ["TRACES"] = str(tmp_path / "traces")
    options = (*MODEL[:2], "--dtype", "float32", "--device-kv", "64M", "--host-kv", "16M", "--max-model-len", "512")
    six = login.serve(
        *options, "--tp", "3", "--pp", "2", launcher=("srun", "-N2", "-n6", "--ntasks-per-node=3", *watched())
    )
    one = login.serve(*options, launcher=("srun", "-N1", "-n1", "--mpi=pmi2"))
    ids = [token_ids(login, job) for job in (six, one)]
    assert ids[0] == ids[1]
    needs = bytes_needed_by_stage(2)
    for stage, node in enumerate(("n1", "n2")):
        assert needs[stage] <= bytes_read(tmp_path / "traces", node) <= 1.05 * needs[stage]


def token_ids(login: Login, job_id: str) -> list[list[int]]:
    prompts = ("The capital of France is", "Water boils at", "def fibonacci(n):")
    options = ("--raw", "--job", job_id, "--max-tokens", "16", "--json")
    return [
        json.loads(login.fastserve("submit", *options, prompt, timeout_s=120).stdout)["token_ids"] for prompt in prompts
    ]
