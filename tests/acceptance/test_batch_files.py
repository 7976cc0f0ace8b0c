"""Batch files against real servers of the fake model: scores, kills on both sides, servers that come back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support import Server

COMMAND = [sys.executable, "-m", "fastserve_hpc", "batch"]


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def openai(custom_id: Any, url: str = "/v1/completions", **body: Any) -> bytes:
    body = {"prompt": "Once", "max_tokens": 3, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode()


def test_scores_of_given_texts(start_server: Callable[..., Server], tmp_path: Path) -> None:
    server = start_server("--model", "fake", "--max-batch-tokens", "16").wait_ready()
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts: list[Any] = ["a text that is longer than a chunk of the prompt", [5, 6, 7]]
    lines = [openai(f"s{i}", prompt=p, max_tokens=0, echo=True, logprobs=2) for i, p in enumerate(prompts)]
    source.write_bytes(b"\n".join([*lines, openai("g", prompt=[5, 6, 7], echo=True, logprobs=2)]))
    result = server.run(
        "batch", "--endpoint", "default", "--input", str(source), "--output", str(output), "--order", "input"
    )
    assert result.returncode == 0, result.stderr
    text, ids, both = (r["response"]["body"] for r in records(output))
    assert text["choices"][0]["text"] == prompts[0]
    for body, num_tokens in ((text, text["usage"]["prompt_tokens"]), (ids, 3), (both, 6)):
        logprobs = body["choices"][0]["logprobs"]
        assert [len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs")] == [num_tokens] * 3
        assert logprobs["token_logprobs"][0] is None
        assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert both["choices"][0]["logprobs"]["tokens"][1:3] == ["token_id:6", "token_id:7"]
    assert ids["usage"]["completion_tokens"] == 0


def write_lines(path: Path, count: int, max_tokens: int) -> list[str]:
    ids = [f"l{i}" for i in range(count)]
    lines = [{"custom_id": id, "prompt": id, "max_tokens": max_tokens, "ignore_eos": True} for id in ids]
    path.write_text("\n".join(map(json.dumps, lines)))
    return ids


def wait_for_results(path: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_bytes().count(b"\n") >= count):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def all_succeeded(path: Path, ids: list[str]) -> bool:
    found = records(path)
    return sorted(r["custom_id"] for r in found) == sorted(ids) and not any(r["error"] for r in found)


def test_kills_of_the_run_and_of_its_server(start_server: Callable[..., Server], tmp_path: Path) -> None:
    server = start_server("--model", "fake", "--max-batch", "4").wait_ready()
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    ids = write_lines(source, 200, 60)
    command = [*COMMAND, "--endpoint", "default", "--input", str(source), "--output", str(output), "--in-flight", "16"]
    run = subprocess.Popen(command, env=server.env, stderr=subprocess.DEVNULL)
    wait_for_results(output, 5)
    run.kill()
    run.wait()
    before = len(records(output))
    # The next run follows at once, and outlives its server.
    run = subprocess.Popen(command, env=server.env, stderr=subprocess.PIPE, text=True)
    wait_for_results(output, before + 5)
    os.kill(server.rank_pid(0), signal.SIGKILL)
    server.wait()
    start_server("--model", "fake").wait_ready()
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 0, errors
    assert "waiting up to 60 s for it to come back" in errors
    assert all_succeeded(output, ids)


def test_two_stop_signals_leave_no_wrong_results(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    ids = write_lines(source, 24, 400)
    env = {**os.environ, "FASTSERVE_HPC_HOME": str(tmp_path / "home")}
    command = [*COMMAND, "--model", "fake", "--max-batch", "4", "--input", str(source), "--output", str(output)]
    run = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    wait_for_results(output, 1)
    run.send_signal(signal.SIGTERM)
    time.sleep(0.4)
    run.send_signal(signal.SIGTERM)
    _, errors = run.communicate(timeout=30)
    assert run.returncode == 75, errors
    assert not any(record["error"] for record in records(output))
    other = subprocess.run([*command, "--seed", "7"], env=env, capture_output=True, text=True, timeout=60)
    assert other.returncode == 2
    assert "seed was 0, now 7" in other.stderr
    again = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert again.returncode == 0, again.stderr
    assert all_succeeded(output, ids)
