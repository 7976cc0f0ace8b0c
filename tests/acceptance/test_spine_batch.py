"""`fastserve-hpc batch` on ranks of its own and on a running server, and `bench`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support import MPIEXEC, REPOSITORY, Server, descendants, is_alive

PROMPTS = REPOSITORY / "launch" / "prompts.jsonl"
COMMAND = [sys.executable, "-m", "fastserve_hpc"]


def ids_in(path: Path) -> list[str]:
    return sorted(json.loads(line)["custom_id"] for line in path.read_text().splitlines())


@pytest.mark.mpi
def test_a_batch_on_its_own_ranks_ends_with_its_file(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    command = [str(MPIEXEC), "-n", "2", *COMMAND, "batch", "--model", "fake", "--pp", "2"]
    env = {**os.environ, "FASTSERVE_HPC_HOME": str(tmp_path / "home")}
    result = subprocess.run(
        [*command, "--input", PROMPTS, "--output", output, "--json"],
        env=env, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert ids_in(output) == ids_in(PROMPTS)
    summary = json.loads(result.stdout)
    assert (summary["requests"], summary["failed"]) == (48, 0)
    assert not list((tmp_path / "home" / "endpoints").glob("*.json"))


@pytest.mark.mpi
def test_a_batch_told_to_stop_says_75_and_goes_on_with_resume(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"custom_id": f"l{i}", "prompt": f"{i}", "max_tokens": 400, "ignore_eos": True} for i in range(60)]
    source.write_text("\n".join(map(json.dumps, lines)))
    env = {**os.environ, "FASTSERVE_HPC_HOME": str(tmp_path / "home")}
    command = [str(MPIEXEC), "-n", "2", *COMMAND, "batch", "--model", "fake", "--pp", "2", "--max-batch", "4"]
    command += ["--input", str(source), "--output", str(output)]
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (output.exists() and output.stat().st_size):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    family = descendants(process.pid)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 75, errors
    assert not any(map(is_alive, family))
    assert 0 < len(ids_in(output)) < 60
    again = subprocess.run([*command, "--resume"], env=env, capture_output=True, text=True, timeout=100)
    assert again.returncode == 0, again.stderr
    assert ids_in(output) == sorted(f"l{i}" for i in range(60))


def test_a_bad_line_costs_only_itself(start_server: Callable[..., Server], tmp_path: Path) -> None:
    server = start_server("--model", "fake").wait_ready()
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    good = [{"custom_id": f"g{i}", "prompt": "hello", "max_tokens": 5} for i in range(20)]
    bad = ["{", "[1]", '{"custom_id": "x", "prompt": "a", "temperature": NaN}', '{"custom_id": "y"}']
    source.write_text("\n".join([*map(json.dumps, good), *bad]) + "\n")
    result = server.run("batch", "--endpoint", "default", "--input", str(source), "--output", str(output))
    assert result.returncode == 3, result.stderr
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(records) == 24
    assert sorted(r["custom_id"] for r in records if r["error"] is None) == sorted(g["custom_id"] for g in good)


def test_bench_prints_what_scripts_read(start_server: Callable[..., Server], tmp_path: Path) -> None:
    server = start_server("--model", "fake").wait_ready()
    trace = tmp_path / "trace.jsonl"
    rows = [{"arrival_s": i / 50, "prompt_tokens": 5 + i, "output_tokens": 3 + i} for i in range(20)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    for extra in ([], ["--rate", "100"], ["--offline"]):
        result = server.run("bench", "--endpoint", "default", "--trace", str(trace), "--json", *extra)
        assert result.returncode == 0, result.stderr
        report = json.loads(result.stdout)
        assert (report["requests"], report["failed"]) == (20, 0)
        assert report["output_tokens_per_s"] > 0
        for name in ("ttft_s", "tpot_s", "normalized_latency_s"):
            assert set(report[name]) == {"mean", "p50", "p90", "p95", "p99"}
            assert 0 <= report[name]["p50"] <= report[name]["p99"]
