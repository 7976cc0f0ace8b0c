"""What Slurm's environment variables say about the allocation and this process's place in it."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass

from fastserve_hpc.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SlurmStep:
    """The `srun` that started this process."""

    rank: int
    num_tasks: int
    local_rank: int
    node: str
    """Where this process runs, as Slurm calls it."""
    nodes: tuple[str, ...]
    tasks_per_node: tuple[int, ...]
    """In the order of `nodes`."""
    mpi: str | None
    """What `--mpi` came to, as "pmi2", where Slurm says."""


@dataclass(frozen=True, slots=True)
class SlurmAllocation:
    """The Slurm job that this process is part of."""

    job_id: str
    nodes: tuple[str, ...]
    restarts: int
    """How often the job was requeued."""
    end_time: float | None
    """Seconds since 1970 at which the time limit ends it; None where Slurm does not say (before 23.02)."""
    cpus_per_task: int | None
    array_task: int | None
    step: SlurmStep | None
    """None in the batch script itself."""


def read_environ(environ: Mapping[str, str]) -> SlurmAllocation | None:
    """This process's allocation, None outside of Slurm. Raises `ConfigError` for values that no Slurm writes."""
    job_id = environ.get("SLURM_JOB_ID")
    if not job_id:
        return None
    end_time = _int(environ, "SLURM_JOB_END_TIME")
    return SlurmAllocation(
        job_id=job_id,
        nodes=tuple(expand_nodes(environ.get("SLURM_JOB_NODELIST", ""))),
        restarts=_int(environ, "SLURM_RESTART_COUNT") or 0,
        end_time=None if end_time is None else float(end_time),
        cpus_per_task=_int(environ, "SLURM_CPUS_PER_TASK"),
        array_task=_int(environ, "SLURM_ARRAY_TASK_ID"),
        step=_step(environ),
    )


def _step(environ: Mapping[str, str]) -> SlurmStep | None:
    num_tasks = _int(environ, "SLURM_STEP_NUM_TASKS")
    if "SLURM_STEP_ID" not in environ or num_tasks is None:
        return None
    return SlurmStep(
        rank=_int(environ, "SLURM_PROCID") or 0,
        num_tasks=num_tasks,
        local_rank=_int(environ, "SLURM_LOCALID") or 0,
        node=environ.get("SLURMD_NODENAME", ""),
        nodes=tuple(expand_nodes(environ.get("SLURM_STEP_NODELIST", ""))),
        tasks_per_node=tuple(expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))),
        mpi=environ.get("SLURM_MPI_TYPE"),
    )


def _int(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not a number: unset it, or start inside a Slurm allocation") from None


def expand_counts(text: str) -> list[int]:
    """[2, 2, 1] from "2(x2),1"."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ConfigError(f"{text!r} is not how Slurm counts tasks per node")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def expand_nodes(text: str) -> list[str]:
    """["a01", "a02", "b"] from "a[01-02],b"."""
    return [name for pattern in _split_nodes(text) for name in _expand_pattern(pattern)]


def _split_nodes(text: str) -> list[str]:
    """The commas outside of brackets separate patterns."""
    if re.fullmatch(r"(?:[^\[\]]|\[[^\[\]]*\])*", text) is None:
        raise ConfigError(f"{text!r} is not how Slurm lists nodes: its brackets do not match")
    return [pattern for pattern in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text) if pattern]


def _expand_pattern(pattern: str) -> list[str]:
    """A name with any number of [ranges]; a range's first number says how many digits there are."""
    parts = re.split(r"\[([^\]]*)\]", pattern)
    choices = [_expand_ranges(part) if i % 2 else [part] for i, part in enumerate(parts)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _expand_ranges(text: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise ConfigError(f"[{text}] is not how Slurm lists node numbers")
        first, last = match[1], match[2] or match[1]
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers


def parse_duration(text: str) -> float | None:
    """Seconds from how Slurm writes a time left: MM:SS, HH:MM:SS, D-HH:MM:SS. None: without a limit, or not known."""
    match = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def ask_end_time(job_id: str, timeout_s: float = 5.0) -> float | None:
    """When the job's time limit ends it, in seconds since 1970, as `squeue` says. None where it does not."""
    command = ["squeue", "--noheader", f"--jobs={job_id}", "--states=running", "--format=%L"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired):
        return None
    left_s = parse_duration(done.stdout)
    return None if left_s is None else time.time() + left_s


def job_end_time() -> float | None:
    """When the time limit ends this process's Slurm job, in seconds since 1970; None outside of one, or without."""
    allocation = read_environ(os.environ)
    if allocation is None:
        return None
    return ask_end_time(allocation.job_id) if allocation.end_time is None else allocation.end_time
