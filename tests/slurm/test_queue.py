"""What is asked of Slurm: of a real one, and of none."""

from __future__ import annotations

import pytest
from slurm_support import Cluster

from fastserve_hpc.slurm.queue import ActiveJobs, active_jobs, kill_wait_s

ASK = """
import os
from fastserve_hpc.slurm.queue import active_jobs, kill_wait_s
jobs = active_jobs()
print(jobs.cluster, *sorted(jobs.job_ids), kill_wait_s(os.environ), kill_wait_s({"SLURM_JOB_ID": "1"}))
"""


def test_without_slurm_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert active_jobs() is None
    assert kill_wait_s({}) is None
    assert kill_wait_s({"SLURM_JOB_ID": "1"}) == 30.0


def test_only_the_cluster_that_counted_a_job_knows_that_it_has_ended() -> None:
    jobs = ActiveJobs("here", frozenset({"2"}))
    assert jobs.has_ended("1", "here")
    assert not jobs.has_ended("2", "here")
    assert not jobs.has_ended("1", "elsewhere")
    assert not jobs.has_ended("1", None)


@pytest.mark.slurm
def test_a_real_slurm(cluster: Cluster) -> None:
    job_id = cluster.run("sbatch", "--parsable", "--hold", "--wrap=true").stdout.strip()
    assert cluster.run_python(code=ASK)[0].split() == ["test", job_id, "None", "5.0"]
