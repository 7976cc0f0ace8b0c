"""What Slurm says of jobs, for those who only have a job's number."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

_TIMEOUT_S = 5.0
_USUAL_KILL_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class ActiveJobs:
    """This user's jobs that are not over, and the cluster that said so: others count from 1 as well."""

    cluster: str
    job_ids: frozenset[str]

    def has_ended(self, job_id: str, cluster: str | None) -> bool:
        """True only if that is certain."""
        return cluster == self.cluster and job_id not in self.job_ids


def active_jobs(timeout_s: float = _TIMEOUT_S) -> ActiveJobs | None:
    """None where Slurm cannot be asked, or does not answer in time."""
    jobs = _output("squeue", "--noheader", f"--user={os.getuid()}", "--format=%A", timeout_s=timeout_s)
    name = None if jobs is None else _setting("ClusterName", timeout_s)
    return None if jobs is None or name is None else ActiveJobs(name, frozenset(jobs.split()))


def kill_wait_s(environ: Mapping[str, str], timeout_s: float = _TIMEOUT_S) -> float | None:
    """How long after SIGTERM Slurm sends SIGKILL; None outside of a job."""
    if "SLURM_JOB_ID" not in environ:
        return None
    match = re.match(r"\d+", _setting("KillWait", timeout_s) or "")
    return _USUAL_KILL_WAIT_S if match is None else float(match[0])


def _setting(name: str, timeout_s: float) -> str | None:
    config = _output("scontrol", "show", "config", timeout_s=timeout_s)
    match = re.search(rf"^{name}\s*=\s*(\S+)", config or "", re.MULTILINE)
    return None if match is None else match[1]


def _output(*command: str, timeout_s: float) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
