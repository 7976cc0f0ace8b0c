"""Batch files against real servers of the fake model: wrong lines, kills on both sides, servers that come back."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import Server

COMMAND = [sys.executable, "-m", "fastserve_hpc", "batch"]


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def openai(custom_id: Any, url: str = "/v1/completions", **body: Any) -> bytes:
    body = {"prompt": "Once", "max_tokens": 3, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode()


DUPLICATE = openai("good-3", prompt="again")
BAD: list[tuple[bytes, str]] = [
    (b"{", "invalid_json"),
    (b"[1, 2]", "invalid_json"),
    (b'"text"', "invalid_json"),
    (b'{"prompt": "\xff\xfe"}', "invalid_json"),
    (b'{"prompt": "a", "temperature": NaN}', "invalid_json"),
    (b'{"prompt": "a", "temperature": 1e999}', "invalid_json"),
    (b'{"prompt": "' + b"x" * 50_000_000 + b'"}', "line_too_long"),
    (b'{"prompt": "a"', "invalid_json"),
    (openai(None), "missing_custom_id"),
    (openai(""), "missing_custom_id"),
    (DUPLICATE, "duplicate_custom_id"),
    (openai("u", url="/v1/embeddings"), "invalid_url"),
    (openai("m", model="another-model"), "model_not_found"),
    (openai("s", stream=True), "invalid_request"),
    (openai("c", prompt="x" * 5000, max_tokens=None), "context_length_exceeded"),
    (openai("l", max_tokens=10**6), "context_length_exceeded"),
    (openai("p", top_p=7), "invalid_request"),
    (openai("n", max_tokens=-1), "invalid_request"),
    (openai("t", temperature="hot"), "invalid_request"),
    (openai("v", prompt=[1, 2, 10**6]), "invalid_request"),
    (openai("w", prompt=[1, -5]), "invalid_request"),
    (openai("e", prompt=[]), "invalid_request"),
    (openai("g", guided_regex="a+"), "unsupported"),
    (b'{"custom_id": "x"}', "invalid_request"),
]


def test_every_kind_of_wrong_line_costs_only_itself(start_server: Callable[..., Server], tmp_path: Path) -> None:
    server = start_server("--model", "fake", "--max-model-len", "2000").wait_ready()
    good = [openai(f"good-{i}") for i in range(20)]
    lines = [b"\xef\xbb\xbf" + good[0], *good[1:6], b"", *(raw for raw, _ in BAD), b"  \r", *good[6:]]
    places = {lines.index(raw) + 1: code for raw, code in BAD}
    source, output = tmp_path / "in.jsonl.gz", tmp_path / "out.jsonl"
    source.write_bytes(gzip.compress(b"\r\n".join(lines), 1))
    for _ in range(2):  # a rerun finds everything done, and says the same
        result = server.run("batch", "--endpoint", "default", "--input", str(source), "--output", str(output))
        assert result.returncode == 3, result.stderr
        errors = {r["error"]["line"]: r["error"] for r in records(output) if r["error"]}
        assert {line: error["code"] for line, error in errors.items()} == places
        assert all(f"line {line}: " in error["message"] for line, error in errors.items())
        assert len(records(output)) == len(good) + len(BAD)
    assert "custom_id 'good-3' is on line 4 already" in errors[lines.index(DUPLICATE) + 1]["message"]
    ids = [r["custom_id"] for r in records(output) if not r["error"]]
    assert sorted(ids) == sorted(f"good-{i}" for i in range(20))


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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kills_on_a_real_model(start_server: Callable[..., Server], tmp_path: Path) -> None:
    server = start_server("--model", "smollm2-135m", "--max-model-len", "256", "--max-batch", "8").wait_ready()
    source = tmp_path / "in.jsonl"
    lines = [{"custom_id": f"q{i}", "prompt": f"{i} is a number that", "max_tokens": 12} for i in range(64)]
    source.write_text("\n".join(map(json.dumps, lines)))
    command = [*COMMAND, "--endpoint", "default", "--input", str(source), "--in-flight", "16", "--order", "input"]
    rng, texts, num_in_the_middle = random.Random(3), {}, 0
    for name, num_kills in (("whole", 0), ("killed", 10)):
        output = tmp_path / name
        for _ in range(num_kills):
            run = subprocess.Popen([*command, "--output", str(output)], env=server.env, stderr=subprocess.DEVNULL)
            time.sleep(rng.uniform(0.5, 2.5))
            run.kill()
            run.wait()
            if output.exists():
                os.truncate(output, rng.randint(output.stat().st_size // 2, output.stat().st_size))
                num_in_the_middle += output.stat().st_size > 0
        done = subprocess.run([*command, "--output", str(output)], env=server.env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        texts[name] = [(r["custom_id"], r["response"]["body"]["choices"]) for r in records(output)]
    assert [custom_id for custom_id, _ in texts["whole"]] == [line["custom_id"] for line in lines]
    assert texts["killed"] == texts["whole"]
    assert num_in_the_middle >= 3


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
