"""Reading Slurm's environment: plain and hostile values, and the real thing on the test cluster."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slurm_support import Cluster

from fastserve_hpc.errors import ConfigError
from fastserve_hpc.slurm import environ as environ_module
from fastserve_hpc.slurm.environ import (
    SlurmStep,
    expand_counts,
    expand_nodes,
    job_end_time,
    parse_duration,
    read_environ,
)

STEP_ENVIRON = {
    "SLURM_JOB_ID": "812",
    "SLURM_JOB_NODELIST": "gpu-a[07-08,11]",
    "SLURM_JOB_END_TIME": "1796061376",
    "SLURM_RESTART_COUNT": "2",
    "SLURM_CPUS_PER_TASK": "6",
    "SLURM_ARRAY_TASK_ID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "gpu-a[07-08,11]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURMD_NODENAME": "gpu-a08",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_MPI_TYPE": "pmi2",
}


def test_a_step_on_three_nodes() -> None:
    allocation = read_environ(STEP_ENVIRON)
    assert allocation is not None
    assert allocation.job_id == "812"
    assert allocation.nodes == ("gpu-a07", "gpu-a08", "gpu-a11")
    assert allocation.end_time == 1796061376
    assert (allocation.restarts, allocation.cpus_per_task, allocation.array_task) == (2, 6, 3)
    assert allocation.step == SlurmStep(
        rank=3, num_tasks=5, local_rank=1, node="gpu-a08", nodes=allocation.nodes, tasks_per_node=(2, 2, 1), mpi="pmi2"
    )


def test_outside_of_slurm_and_in_a_batch_script() -> None:
    assert read_environ({}) is None
    assert read_environ({"SLURM_CONF": "/etc/slurm.conf"}) is None
    batch = read_environ({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"})
    assert batch is not None
    assert batch.step is None
    assert batch.end_time is None
    assert batch.restarts == 0


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "SLURM_JOB_END_TIME", "SLURM_STEP_TASKS_PER_NODE"])
def test_nonsense_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match="many"):
        read_environ({**STEP_ENVIRON, name: "many"})


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("n1,login-2.site", ["n1", "login-2.site"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[008-011],x", ["n008", "n009", "n010", "n011", "x"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
        ("a[1]b,c[2-2]d", ["a1b", "c2d"]),
    ],
)
def test_node_lists(text: str, names: list[str]) -> None:
    assert expand_nodes(text) == names


@given(st.lists(st.integers(0, 9999), min_size=1, max_size=9), st.integers(1, 5))
def test_any_node_numbers_survive(numbers: list[int], width: int) -> None:
    names = [f"n{number:0{width}d}" for number in numbers]
    assert expand_nodes(f"n[{','.join(name[1:] for name in names)}]") == names


@pytest.mark.parametrize("text", ["n[a-b]", "n[1-]", "n[]", "n[1--2]", "n[1", "n1]", "n[[1]]"])
def test_broken_node_lists_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="Slurm lists node"):
        expand_nodes(text)


def test_counts() -> None:
    assert expand_counts("4(x3),2,1(x2)") == [4, 4, 4, 2, 1, 1]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0:05", 5), ("1:02:03", 3723), ("2-00:00:01", 172801), ("UNLIMITED", None), ("INVALID", None), ("", None)],
)
def test_durations(text: str, seconds: float | None) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.slurm
def test_what_a_real_step_says(cluster: Cluster) -> None:
    """Ranks, nodes and the end of the time limit, from within a step of two nodes."""
    program = (
        "import os; from fastserve_hpc.slurm.environ import *; a = read_environ(os.environ);"
        "print(a.step.rank, a.step.num_tasks, a.step.local_rank, *a.step.tasks_per_node, a.step.mpi, a.step.node,"
        "*a.step.nodes, a.end_time or ask_end_time(a.job_id))"
    )
    lines = sorted(cluster.run_python("srun", "-N2", "-n4", "--ntasks-per-node=2", "--time=3", code=program))
    assert [line.rsplit(" ", 1)[0] for line in lines] == [
        f"{r} 4 {r % 2} 2 2 pmi2 n{r // 2 + 1} n1 n2" for r in range(4)
    ]
    ends = [float(line.rsplit(" ", 1)[1]) for line in lines]
    assert all(120 < end - time.time() <= 181 for end in ends)


def test_the_end_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert job_end_time() is None
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1700000000")
    assert job_end_time() == 1.7e9
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    monkeypatch.setattr(environ_module, "ask_end_time", lambda job: 5.0 if job == "7" else None)
    assert job_end_time() == 5.0
