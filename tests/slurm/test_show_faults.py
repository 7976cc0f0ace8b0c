"""Issue 5, Shows 2 and 3: starts that cannot work, ranks and nodes that die."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_support import PROGRAM, SRUN, Cluster, Login, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(180)]

FAKE = ("--model", "fake", "--pp", "2")
WITHOUT_KILL = (*SRUN, "--kill-on-bad-exit=0", "--wait=0")


@pytest.fixture
def login(cluster: Cluster, tmp_path: Path) -> Iterator[Login]:
    user = Login(cluster, tmp_path / "home")
    yield user
    user.end()


def refused_start(login: Login, *command: str, within_s: float) -> str:
    """What a start that must fail says."""
    began = time.monotonic()
    done = login.cluster.run(*command, timeout_s=60, **login.environ)
    assert time.monotonic() - began < within_s
    assert done.returncode != 0
    return done.stdout + done.stderr


def test_show_2_ranks_that_are_alone(login: Login) -> None:
    command = ("srun", "-n2", "--mpi=none", *PROGRAM, "serve", *FAKE)
    assert "`srun --mpi=pmi2`" in refused_start(login, *command, within_s=10)


def test_show_2_another_version_on_one_rank(login: Login, tmp_path: Path) -> None:
    """A wrapper stands for a second installation."""
    program = tmp_path / "serve.py"
    program.write_text(
        "import os, fastserve_hpc\n"
        "if os.environ['SLURM_PROCID'] == '1': fastserve_hpc.__version__ = '0.0.9'\n"
        "from fastserve_hpc.cli import main\n"
        "main()\n"
    )
    said = refused_start(login, *SRUN, sys.executable, str(program), "serve", *FAKE, within_s=20)
    assert re.search(r"versions: rank \d on n\d: fastserve-hpc \S+, but \S+ on the other ranks", said)
    assert "0.0.9" in said


def test_show_2_a_model_that_is_missing_on_one_node(login: Login) -> None:
    """/tmp is each node's own."""
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "vocab_size": 256}
    sizes = {"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": True}
    text = json.dumps({**config, **sizes, **more})
    login.cluster.run("sh", "-c", f"mkdir -p /tmp/only-here && echo '{text}' > /tmp/only-here/config.json", node="n1")
    login.cluster.run("sh", "-c", "echo '{}' > /tmp/only-here/tokenizer.json", node="n1")
    said = refused_start(login, *SRUN, *PROGRAM, "serve", "--model", "/tmp/only-here", "--pp", "2", within_s=20)
    assert "rank 1 on n2" in said
    assert "/tmp/only-here: no such file or directory" in said


@pytest.mark.slow
def test_show_2_nodes_that_cannot_reach_each_other(login: Login) -> None:
    login.cluster.cut("n1", "n2")
    said = refused_start(login, *SRUN, *PROGRAM, "serve", *FAKE, within_s=25)
    assert "rank 0 on n1: n2 does not answer (silent for 3 s)" in said


class Faulty:
    """A server of the fake model on two nodes, one of whose ranks something happens to."""

    def __init__(self, login: Login, *options: str):
        self._login = login
        self.job_id = login.serve(*FAKE, *options, launcher=WITHOUT_KILL)
        self._step: subprocess.Popen[str] = login.started[-1]
        self._began = time.monotonic()

    def signal(self, name: str, node: str) -> None:
        pid = self._login.cluster.run("pgrep", "-f", "fastserve_hpc serve", node=node).stdout.split()[0]
        self._began = time.monotonic()
        self._login.cluster.run("kill", f"-{name}", pid, node=node)

    def power_off(self, node: str) -> None:
        self._began = time.monotonic()
        self._login.cluster.kill(node)

    def end(self, within_s: float) -> str:
        """What the step has said when it is over."""
        output, _ = self._step.communicate(timeout=60)
        assert time.monotonic() - self._began < within_s, output
        assert self._step.returncode != 0
        return output


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_show_3_a_killed_rank_ends_the_step_in_5_s(login: Login, victim: int) -> None:
    faulty = Faulty(login)
    faulty.signal("KILL", f"n{victim + 1}")
    assert re.search(rf"rank {victim} \(pid \d+ on n{victim + 1}\) is lost", faulty.end(within_s=5))
    wait_until(lambda: not login.ranks(), 10, "the ranks to end")


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_show_3_a_stopped_rank_is_reported_and_the_step_ends(login: Login, victim: int) -> None:
    """Slurm itself would wait for it."""
    faulty = Faulty(login, "--heartbeat-s", "3")
    faulty.signal("STOP", f"n{victim + 1}")
    output = faulty.end(within_s=3 + 7)
    silent = re.search(rf"rank {victim} \(pid \d+ on n{victim + 1}\) is lost.* no sign of life for (\S+) s", output)
    assert silent is not None, output
    assert float(silent[1]) <= 3.5
    wait_until(lambda: not login.ranks(), 10, "the ranks to end")


@pytest.mark.slow
def test_show_3_a_node_without_power_ends_the_step_in_30_s(login: Login) -> None:
    faulty = Faulty(login)
    faulty.power_off("n2")
    assert re.search(r"rank 1 \(pid \d+ on n2\) is lost", faulty.end(within_s=30))


@pytest.mark.slow
def test_a_job_that_was_killed_is_not_taken_for_a_server(login: Login) -> None:
    """Nobody could write to its endpoint file any more: clients are told by Slurm."""
    faulty = Faulty(login)
    login.cluster.kill("n1")
    login.cluster.run("scancel", faulty.job_id)
    wait_until(lambda: not login.cluster.run("squeue", "-h").stdout, 40, "the job to end")
    began = time.monotonic()
    refused = login.fastserve("status", "--job", faulty.job_id)
    assert time.monotonic() - began < 5
    assert "its Slurm job" in refused.stderr
