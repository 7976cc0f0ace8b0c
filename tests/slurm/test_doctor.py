"""The start-up doctor where things go wrong for real: nodes, networks, launchers, installations."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from slurm_support import OUR_PATH, Cluster

pytestmark = pytest.mark.slurm

SRUN = ("srun", "-N2", "--ntasks-per-node=1")
DOCTOR = (sys.executable, "-m", "fastserve_hpc", "doctor")

CONFIG = json.dumps(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
)


def doctor(cluster: Cluster, *arguments: str, launcher: tuple[str, ...] = SRUN) -> tuple[int, list[dict[str, Any]]]:
    """The exit status and the findings that are not ok."""
    done = cluster.run(*launcher, *DOCTOR, "--json", *arguments, timeout_s=60, PYTHONPATH=OUR_PATH)
    findings = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert findings, done.stderr
    return done.returncode, [finding for finding in findings if finding["level"] != "ok"]


def test_two_healthy_nodes(cluster: Cluster) -> None:
    status, findings = doctor(cluster, "--model", "smollm2-135m", "--pp", "2")
    assert status == 0
    assert [f for f in findings if f["check"] != "links"] == []  # two busy cores make slow links


def test_tensor_parallel_ranks_on_two_nodes(cluster: Cluster) -> None:
    launcher = ("srun", "-N2", "--ntasks-per-node=2", "--distribution=cyclic")
    status, findings = doctor(cluster, "--model", "fake", "--tp", "2", "--pp", "2", launcher=launcher)
    assert status == 0
    assert [f["value"] for f in findings if f["check"] == "places"] == [
        "the 2 ranks of its stage are spread over n1, n2"
    ] * 2


def test_model_missing_on_one_node(cluster: Cluster) -> None:
    """/tmp is each node's own."""
    cluster.run("sh", "-c", f"mkdir -p /tmp/m && echo '{CONFIG}' > /tmp/m/config.json", node="n1")
    status, [finding] = doctor(cluster, "--model", "/tmp/m", "--pp", "2")
    assert status == 2
    assert (finding["level"], finding["check"], finding["rank"], finding["host"]) == ("error", "model", 1, "n2")
    assert "/tmp/m: no such file or directory" in finding["value"]


def test_another_model_on_one_node(cluster: Cluster) -> None:
    for node, content in (("n1", CONFIG), ("n2", f"{CONFIG} ")):
        cluster.run("sh", "-c", f"mkdir -p /tmp/m && echo '{content}' > /tmp/m/config.json", node=node)
    status, findings = doctor(cluster, "--model", "/tmp/m", "--pp", "2")
    assert status == 2
    assert [finding["check"] for finding in findings] == ["model"]
    assert "not those that other ranks see" in findings[0]["value"]


def test_another_version_on_one_node(cluster: Cluster, tmp_path: Path) -> None:
    """A wrapper stands for a second installation."""
    program = tmp_path / "doctor.py"
    program.write_text(
        "import os, fastserve_hpc\n"
        "if os.environ['SLURM_PROCID'] == '1': fastserve_hpc.__version__ = '0.0.9'\n"
        "from fastserve_hpc.cli import main\n"
        "main()\n"
    )
    command = (*SRUN, sys.executable, str(program), "doctor", "--model", "fake", "--pp", "2")
    done = cluster.run(*command, PYTHONPATH=OUR_PATH)
    assert done.returncode == 2
    [line] = [line for line in done.stdout.splitlines() if line.startswith("error")]
    assert "versions" in line
    assert "fastserve-hpc 0.0.9, but 0.1.0" in line


def test_a_launcher_that_mpi_does_not_know(cluster: Cluster) -> None:
    began = time.monotonic()
    done = cluster.run(*SRUN, "--mpi=none", *DOCTOR, "--model", "fake", "--pp", "2", PYTHONPATH=OUR_PATH)
    assert time.monotonic() - began < 10
    assert done.returncode == 2
    assert "--mpi=pmi2" in done.stderr


@pytest.mark.slow
def test_nodes_that_cannot_reach_each_other(cluster: Cluster) -> None:
    """Named before MPI_Init, which hangs; and that is not waited for."""
    cluster.cut("n1", "n2")
    launcher = cluster.popen(*SRUN, *DOCTOR, "--model", "fake", "--pp", "2", PYTHONPATH=OUR_PATH)
    began = time.monotonic()
    output, _ = launcher.communicate(timeout=50)
    assert time.monotonic() - began < 25
    assert launcher.returncode != 0
    assert "rank 0 on n1: n2 does not answer (silent for 3 s)" in output
    assert "rank 1 on n2: n1 does not answer (silent for 3 s)" in output


CUT_AFTER_INIT = """
import os, pathlib, sys, time
from fastserve_hpc.config import EngineConfig
from fastserve_hpc.doctor import run
from fastserve_hpc.parallel.mpi_init import init_mpi
world = init_mpi()
here = pathlib.Path(sys.argv[1])
(here / f"ready-{world.rank}").touch()
while not (here / "cut").exists():
    time.sleep(0.1)
began = time.monotonic()
findings = run(world, EngineConfig(model="fake", pp=2), os.environ)
took = time.monotonic() - began
lines = [str(finding) for finding in findings if finding.level == "error"]
(here / f"found-{world.rank}").write_text(chr(10).join([f"{took:.1f}", *lines]))
os._exit(2)
"""


@pytest.mark.slow
def test_network_lost_after_mpi_init(cluster: Cluster, tmp_path: Path) -> None:
    launcher = cluster.popen(*SRUN, sys.executable, "-c", CUT_AFTER_INIT, str(tmp_path), PYTHONPATH=OUR_PATH)
    deadline = time.monotonic() + 30
    while not all((tmp_path / f"ready-{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    cluster.cut("n1", "n2")
    (tmp_path / "cut").touch()
    launcher.communicate(timeout=50)
    found = [(tmp_path / f"found-{rank}").read_text().splitlines() for rank in range(2)]
    assert all(float(took) < 20 for took, *_ in found)
    assert any(line.startswith("links: rank 0 on n1: to rank 1 on an unknown host: ") for line in found[0]), found
    assert any(line.startswith("links: rank 1 on an unknown host: no word from it") for line in found[0]), found
    assert any(line.startswith("links: rank 1 on n2: no word from rank 0") for line in found[1]), found
