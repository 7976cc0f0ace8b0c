"""The launch scripts, as far as they do not need a server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support import REPOSITORY

from fastserve_hpc.batch.reader import BatchItem, read_batch

LAUNCH = REPOSITORY / "launch"
SHOW = (
    "import os; print(sorted(os.sched_getaffinity(0)), "
    "os.environ.get('OMP_NUM_THREADS'), os.environ.get('CUDA_VISIBLE_DEVICES'))"
)
PLACE_VARIABLES = ("MPI_LOCAL", "OMPI_", "PMIX_", "PMI_", "SLURM_", "CUDA_", "OMP_")


def bound(**place: str) -> str:
    """What a rank sees that bind_rank.sh has started."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(PLACE_VARIABLES)}
    command = ["bash", str(LAUNCH / "bind_rank.sh"), sys.executable, "-c", SHOW]
    return subprocess.run(
        command, env={**clean, **place}, capture_output=True, text=True, timeout=30, check=True
    ).stdout.strip()


CORES = sorted(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    "names",
    [("MPI_LOCALRANKID", "MPI_LOCALNRANKS"), ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")],
)
@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores to share")
def test_ranks_of_a_node_share_its_cores(names: tuple[str, str]) -> None:
    share = len(CORES) // 2
    assert bound(**dict(zip(names, "02", strict=True))) == f"{CORES[:share]} {share} None"
    assert bound(**dict(zip(names, "12", strict=True))) == f"{CORES[share : 2 * share]} {share} None"


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores to share")
def test_slurm_tells_how_many_tasks_are_here() -> None:
    place = {"SLURM_LOCALID": "1", "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "4(x2),2"}
    share = len(CORES) // 2
    assert bound(**place) == f"{CORES[share : 2 * share]} {share} None"
    assert bound(**place, SLURM_CPU_BIND_TYPE="mask_cpu:") == f"{CORES} None None"


def test_nothing_changes_without_a_place_or_with_more_ranks_than_cores() -> None:
    assert bound() == f"{CORES} None None"
    assert bound(MPI_LOCALRANKID="0", MPI_LOCALNRANKS="1") == f"{CORES} None None"
    assert bound(MPI_LOCALRANKID="0", MPI_LOCALNRANKS="9999") == f"{CORES} None None"


def test_each_rank_sees_its_own_gpu() -> None:
    gpus = {"CUDA_VISIBLE_DEVICES": "4,5,GPU-x"}
    assert bound(MPI_LOCALRANKID="2", MPI_LOCALNRANKS="3", **gpus).endswith("GPU-x")
    assert bound(MPI_LOCALRANKID="1", MPI_LOCALNRANKS="2", CUDA_VISIBLE_DEVICES="7").endswith(" 7")


def fake_venv(directory: Path, *programs: str) -> Path:
    (directory / "bin").mkdir(parents=True)
    for name in programs:
        program = directory / "bin" / name
        program.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit\necho {name} "$@"\n')
        program.chmod(0o755)
    return directory


def local(venv: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(LAUNCH / "local.sh"), *args]
    return subprocess.run(
        command,
        env={"PATH": "/usr/bin:/bin", "VENV": str(venv), **env},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_local_runs_one_rank_without_mpi_and_several_with(tmp_path: Path) -> None:
    venv = fake_venv(tmp_path, "fastserve-hpc", "mpiexec")
    program = venv / "bin" / "fastserve-hpc"
    assert local(venv, "serve", "--pp", "1").stdout == "fastserve-hpc serve --pp 1\n"
    assert local(venv, "-n", "2", "serve").stdout == f"mpiexec -n 2 {program} serve\n"
    assert local(venv, "-n", "2", "serve", BIND="1").stdout == f"mpiexec -n 2 {LAUNCH}/bind_rank.sh {program} serve\n"


def test_local_says_what_is_missing(tmp_path: Path) -> None:
    assert "launch/local.sh -n 2 serve" in local(tmp_path).stdout
    assert local(tmp_path).returncode == 2
    assert "quickstart.sh" in local(tmp_path, "serve").stderr
    venv = fake_venv(tmp_path / "venv", "fastserve-hpc")
    if not any(Path(place, "mpiexec").exists() for place in ("/usr/bin", "/bin")):
        assert "no mpiexec" in local(venv, "-n", "2", "serve").stderr


def test_the_shipped_prompts_are_48_good_lines_of_several_kinds() -> None:
    with (LAUNCH / "prompts.jsonl").open("rb") as lines:
        items = list(read_batch(lines))
    good = [item for item in items if isinstance(item, BatchItem)]
    assert len(items) == len(good) == 48
    kinds = Counter(item.custom_id.partition("-")[0] for item in good)
    assert set(kinds) == {"fact", "hpc", "sum", "code", "math", "word", "story"}
    assert {item.ask.kind for item in good} == {"chat", "completion"}
    assert all(item.ask.sampling.max_tokens is not None for item in good)


def test_the_quickstart_table(tmp_path: Path) -> None:
    times = {"mean": 1.0, "p50": 1.0, "p90": 1.0, "p95": 2.5, "p99": 3.0}
    batch = {"requests": 48, "output_tokens_per_s": 99.5, "ttft_s": times, "latency_s": times}
    (tmp_path / "batch.json").write_text(json.dumps(batch))
    (tmp_path / "interactive.jsonl").write_text('{"output_tokens": 10, "ttft_s": 0.5, "latency_s": 2.0}\n' * 3)
    command = [sys.executable, str(LAUNCH / "quickstart_report.py"), "batch.json", "interactive.jsonl"]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=30, check=True)
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["batch", "48", "99.5", "1.00", "2.50", "1.00", "2.50"] in rows
    assert ["interactive", "3", "5.0", "0.50", "0.50", "2.00", "2.00"] in rows


def test_ending_a_step_ends_what_it_has_started(tmp_path: Path) -> None:
    """As pip starts a compiler: Ctrl-C must not leave that behind."""
    started = tmp_path / "pid"
    script = f"""
        . {LAUNCH / "common.sh"}
        trap '[ -z "$STEP_PID" ] || end_process "$STEP_PID"' EXIT
        trap 'exit 143' TERM
        run_step {tmp_path / "log"} 'a step' \\
            bash -c 'sleep 60 & echo $! >{started}.part; mv {started}.part {started}; wait'
    """
    with subprocess.Popen(["bash", "-c", script], stdout=subprocess.DEVNULL) as shell:
        assert within_a_while(started.exists)
        shell.terminate()
        assert shell.wait(timeout=20) == 143
    assert within_a_while(lambda: not psutil.pid_exists(int(started.read_text())))


def within_a_while(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()
