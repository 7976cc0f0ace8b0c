"""Issue 5: what a network between two stages costs (Show 1), and tensor-parallel stages in float32 (Shows 1 and 6)."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_support import Cluster, Login
from weights_read import bytes_needed_by_stage, bytes_read, watched

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1200)]

MODEL = ("--model", "smollm2-135m", "--device-kv", "320M", "--host-kv", "16M", "--max-model-len", "1024")
# Both ways each rank has one core, and the same one: the nodes of the test cluster share all of them.
BOUND = ("sh", "-c", 'exec taskset -c "$SLURM_PROCID" "$@"', "sh")
ROUNDS = 2


@pytest.fixture
def login(cluster: Cluster, tmp_path: Path) -> Iterator[Login]:
    user = Login(cluster, tmp_path / "home")
    yield user
    user.end()


def tokens_per_s(login: Login, job_id: str, trace: Path) -> float:
    done = login.fastserve("bench", "--job", job_id, "--trace", str(trace), "--offline", "--json", timeout_s=500)
    assert done.returncode == 0, done.stderr
    return float(json.loads(done.stdout)["output_tokens_per_s"])


def test_show_1_pp_2_over_tcp_is_nearly_as_fast_as_on_one_host(login: Login, tmp_path: Path) -> None:
    """64 requests of 128 and 64 tokens at once, in turn on both, the quickest round of each: neighbours are noise."""
    trace = tmp_path / "w1.jsonl"
    trace.write_text('{"arrival_s": 0, "prompt_tokens": 128, "output_tokens": 64}\n' * 64)
    two_nodes = login.serve(*MODEL, "--pp", "2", launcher=("srun", "-N2", "-n2", "--mpi=pmi2", *BOUND))
    one_host = login.serve(*MODEL, "--pp", "2", launcher=("srun", "-N1", "-n2", "--mpi=pmi2", *BOUND))
    rates = {job: [0.0] * ROUNDS for job in (two_nodes, one_host)}
    for number in range(ROUNDS):
        for job in rates:
            rates[job][number] = tokens_per_s(login, job, trace)
    over_tcp, inside = rates[two_nodes], rates[one_host]
    pairs = statistics.median(a / b for a, b in zip(over_tcp, inside, strict=True))
    print(
        f"output tokens/s over TCP {over_tcp}, on one host {inside}: best {max(over_tcp) / max(inside):.2f}, {pairs=}"
    )
    assert max(over_tcp) >= 0.8 * max(inside)


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
