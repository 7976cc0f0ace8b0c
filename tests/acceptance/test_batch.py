"""Issue 6: one test or more for each line of its Shows. What takes minutes is slow."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import REPOSITORY, Server

from fastserve_hpc.client import Client
from fastserve_hpc.models.locate import locate

COMMAND = [sys.executable, "-m", "fastserve_hpc", "batch"]
BENCHMARKS = REPOSITORY / "benchmarks"


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def openai(custom_id: Any, url: str = "/v1/completions", **body: Any) -> bytes:
    body = {"prompt": "Once", "max_tokens": 3, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode()


def benchmark(name: str, *args: str, timeout_s: float) -> Any:
    """What a benchmark says with --json."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(BENCHMARKS / name), "--json", *args]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# 1. Nothing is lost, nothing comes twice.


def kill_runs(directory: Path, num_runs: int, seed: int, timeout_s: float) -> int:
    """How often a run was left in the middle."""
    command = [sys.executable, str(REPOSITORY / "tests" / "kill_runs.py"), str(directory), str(num_runs), str(seed)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    match = re.search(rf"^{num_runs} runs, (\d+) times left in the middle$", done.stdout, re.MULTILINE)
    assert match, done.stdout
    return int(match[1])


def test_show_1_every_line_exactly_once_after_kills_and_cuts(tmp_path: Path) -> None:
    assert kill_runs(tmp_path, 25, seed=1, timeout_s=100) >= 15


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_show_1_every_line_exactly_once_after_250_kills_and_cuts(tmp_path: Path) -> None:
    assert kill_runs(tmp_path, 250, seed=2, timeout_s=550) >= 150


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_show_1_kills_on_a_real_model(start_server: Callable[..., Server], tmp_path: Path) -> None:
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


# 2. What is wrong costs only itself.

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


def test_show_2_every_kind_of_wrong_line_costs_only_itself(start_server: Callable[..., Server], tmp_path: Path) -> None:
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


def small_disk() -> None:
    """No file may grow beyond 16 KiB; as good as a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, 2**14))


def test_show_2_a_full_disk_is_said_and_resumed(start_server: Callable[..., Server], tmp_path: Path) -> None:
    server = start_server("--model", "fake").wait_ready()
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_lines(source, [{"custom_id": f"l{i}", "prompt": f"{i}", "max_tokens": 20} for i in range(200)])
    arguments = ("batch", "--endpoint", "default", "--input", str(source), "--output", str(output))
    full = server.run(*arguments, preexec_fn=small_disk)
    assert full.returncode == 1
    assert f"--output {output}: File too large; what is written stays, run the same command again" in full.stderr
    assert 0 < len(records(output)) < 200
    again = server.run(*arguments)
    assert again.returncode == 0, again.stderr
    assert sorted(r["custom_id"] for r in records(output)) == sorted(f"l{i}" for i in range(200))


def test_show_2_a_directory_that_is_removed_is_said_and_resumed(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    server = start_server("--model", "fake", "--max-batch", "2").wait_ready()
    source, directory = tmp_path / "in.jsonl", tmp_path / "results"
    directory.mkdir()
    write_lines(source, [{"prompt": f"{i}", "max_tokens": 300, "ignore_eos": True} for i in range(400)])
    output = directory / "out.jsonl"
    command = [*COMMAND, "--endpoint", "default", "--input", str(source), "--output", str(output)]
    run = subprocess.Popen(command, env=server.env, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (output.exists() and output.stat().st_size):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    shutil.rmtree(directory)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 1
    assert re.search("is gone|was removed", errors), errors
    directory.mkdir()
    write_lines(source, [{"prompt": f"{i}", "max_tokens": 3} for i in range(40)])
    again = subprocess.run(command, env=server.env, capture_output=True, text=True, timeout=60)
    assert again.returncode == 0, again.stderr
    assert len(records(output)) == 40


# 3. A file costs the engine nothing.


def test_show_3_reading_and_writing_are_quick_and_small() -> None:
    (row,) = benchmark("batch.py", "--lines", "40000", timeout_s=100)
    assert row["lines_per_cpu_s"] >= 15_000
    assert row["mib_above_start"] < 150


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_show_3_a_million_lines() -> None:
    (row,) = benchmark("batch.py", "--lines", "1000000", timeout_s=850)
    assert row["lines_per_cpu_s"] >= 20_000
    assert row["mib_above_start"] < 150


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_show_3_a_file_runs_as_fast_as_what_is_in_memory() -> None:
    """Where others use the machine tokens a second say little, but an engine kept as full needs as many iterations."""
    found = benchmark("batch_engine.py", "--requests", "250", "--in-flight", "128", "--rounds", "3", timeout_s=1700)
    runs = [run for pair in found["pairs"] for run in pair.values()]
    assert found["iterations"] <= 1.1
    if max(run["other_busy_cores"] for run in runs) < 0.3:
        assert found["ratio"] >= 0.97


# 4. Live users hardly notice. test_slowdown.py has the bounds under the scheduler's own clock.


def test_show_4_a_deadline_that_cannot_be_met_is_said(start_server: Callable[..., Server], tmp_path: Path) -> None:
    server = start_server("--model", "fake", "--max-batch", "1").wait_ready()
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_lines(source, [{"prompt": f"{i}", "max_tokens": 2000, "ignore_eos": True} for i in range(400)])
    command = [*COMMAND, "--endpoint", "default", "--input", str(source), "--output", str(output), "--deadline", "3s"]
    run = subprocess.Popen(command, env=server.env, stderr=subprocess.PIPE, text=True)
    assert run.stderr is not None
    said = next(line for line in run.stderr if "deadline" in line)
    assert "will not be done by the deadline" in said or "the deadline has passed; the run goes on" in said
    run.terminate()
    run.communicate(timeout=30)
    assert run.returncode == 75


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_show_4_a_deadline_is_kept_beside_live_users_where_it_can_be(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    """With so small an S the lines would take several times as long."""
    server = start_server("--model", "smollm2-135m", "--prefix-cache", "off").wait_ready()
    load, source, output = tmp_path / "load.jsonl", tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_lines(load, [{"arrival_s": i / 2, "prompt_tokens": 30, "output_tokens": 20} for i in range(2000)])
    files = ("--endpoint", "default", "--input", str(source), "--output", str(output), "--batch-slowdown", "1.1")
    live = subprocess.Popen([*COMMAND[:-1], "bench", "--endpoint", "default", "--trace", str(load)], env=server.env,
                            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        write_lines(source, [{"prompt": f"Number {i}", "max_tokens": 40, "ignore_eos": True} for i in range(80)])
        met = server.run("batch", *files, "--deadline", "75s", timeout_s=200)
        write_lines(source, [{"prompt": f"Number {i}", "max_tokens": 100, "ignore_eos": True} for i in range(5000)])
        command = [*COMMAND, *files, "--deadline", "60s", "--overwrite"]
        began, run = time.monotonic(), subprocess.Popen(command, env=server.env, stderr=subprocess.PIPE, text=True)
        assert run.stderr is not None
        said = next(line for line in run.stderr if "deadline" in line)
        said_after_s = time.monotonic() - began
        run.terminate()
        run.communicate(timeout=30)
    finally:
        live.terminate()
        live.wait()
    assert met.returncode == 0, met.stderr
    assert "deadline" not in met.stderr
    assert "will not be done by the deadline" in said
    assert said_after_s < 55


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_show_4_interactive_requests_keep_within_the_bound() -> None:
    found = benchmark("batch_beside.py", "--seconds", "60", "--slowdown", "2", timeout_s=1700)
    (row,) = found["rows"]
    assert row["batch_tokens"] > 0
    if max(found["alone"]["other_busy_cores"], row["other_busy_cores"]) < 0.3:  # both runs had the same machine
        assert row["ttft_p95"] <= 2
        assert row["normalized_p95"] <= 2


# 5. Scores are those of the evaluation harness.


def test_show_5_score_writes_what_a_harness_reads(start_server: Callable[..., Server], tmp_path: Path) -> None:
    server = start_server("--model", "fake", "--max-batch-tokens", "16").wait_ready()
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    pairs: list[tuple[Any, Any, int]] = [("a context of several chunks", " 56", 3), ("spaces  ", "x", 3), ("", "ab", 2),
                                         ([1, 2], [3], 1)]  # fmt: skip
    lines: list[dict[str, Any]] = [
        {"custom_id": f"s{i}", "context": context, "continuation": continuation, "task": "t"}
        for i, (context, continuation, _) in enumerate(pairs)
    ]
    write_lines(source, [*lines, {"custom_id": "bad", "context": "a"}])
    files = ("--endpoint", "default", "--input", str(source), "--output", str(output), "--order", "input")
    for _ in range(2):  # again: all is there
        result = server.run("score", *files)
        assert result.returncode == 3, result.stderr
        found = records(output)
        for i, (record, (_, _, num_tokens)) in enumerate(zip(found, pairs, strict=False)):
            scored = {"loglikelihood": -0.5 * num_tokens, "is_greedy": True, "tokens": num_tokens, "error": None}
            assert record == {"id": f"batch_req_{i + 1}", "custom_id": f"s{i}", **scored, "extra": {"task": "t"}}
        assert found[4]["error"]["message"] == (
            "line 5: continuation is missing: a line of score holds context and continuation"
        )
    other = server.run("batch", *files)
    assert other.returncode == 2
    assert "task was score, now batch" in other.stderr


def oracle() -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = locate("smollm2-135m").path
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(**where)


def harness_pair(tokenizer: Any, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Token ids of both, as lm-evaluation-harness has them."""
    num_spaces = len(context) - len(context.rstrip())
    if num_spaces > 0:
        continuation, context = context[-num_spaces:] + continuation, context[:-num_spaces]
    before, whole = (tokenizer.encode(text, add_special_tokens=False) for text in (context, context + continuation))
    return before or [tokenizer.bos_token_id], whole[len(before) :]


def harness(model: Any, tokenizer: Any, context: str, continuation: str) -> tuple[float, bool]:
    """Log-likelihood and is_greedy as lm-evaluation-harness computes them, one pair at a time."""
    import torch

    before, after = harness_pair(tokenizer, context, continuation)
    with torch.inference_mode():
        logits = model(torch.tensor([[*before, *after][:-1]])).logits[0, len(before) - 1 :]
    scores = torch.log_softmax(logits.double(), -1)
    picked = scores[range(len(after)), after]
    return float(picked.sum()), scores.argmax(-1).tolist() == after


def pairs_of_texts(model: Any, tokenizer: Any, count: int) -> list[tuple[str, str]]:
    """Pieces of the documentation; every other one goes on with what the model itself finds likeliest."""
    import torch

    text = (REPOSITORY / "docs" / "architecture.md").read_text()
    rng = random.Random(5)
    pairs: list[tuple[str, str]] = [("", "Paris is the capital"), ("Spaces at the end  ", "and more")]
    while len(pairs) < count:
        start = rng.randrange(len(text) - 300)
        middle = start + rng.randint(5, 120)
        context, continuation = text[start:middle], text[middle : middle + rng.randint(3, 60)]
        if len(pairs) % 2 == 0:
            context = context.rstrip() or "The"
            with torch.inference_mode():
                logits = model(torch.tensor([tokenizer.encode(context, add_special_tokens=False)])).logits[0, -1]
            continuation = tokenizer.decode([int(logits.argmax())])
        if harness_pair(tokenizer, context, continuation)[1]:  # in the middle of a word it may have no token of its own
            pairs.append((context, continuation))
    return pairs


def check_scores(output: Path, wanted: list[tuple[float, bool]]) -> None:
    for record, (loglikelihood, is_greedy) in zip(records(output), wanted, strict=True):
        assert record["loglikelihood"] == pytest.approx(loglikelihood, abs=1e-3)
        assert record["is_greedy"] == is_greedy


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_show_5_scores_are_those_of_transformers(start_server: Callable[..., Server], tmp_path: Path) -> None:
    """At once; and where prompts go in chunks and interactive requests take the memory of what has begun."""
    import torch

    torch.set_num_threads(1)  # the server computes beside it, and threads that wait would spin
    model, tokenizer = oracle()
    pairs = pairs_of_texts(model, tokenizer, 100)
    wanted = [harness(model, tokenizer, *pair) for pair in pairs]
    assert 30 <= sum(is_greedy for _, is_greedy in wanted) < len(pairs)
    source = tmp_path / "in.jsonl"
    write_lines(source, [{"context": context, "continuation": continuation} for context, continuation in pairs])
    common = ("--model", "smollm2-135m", "--dtype", "float32", "--max-model-len", "192")
    server = start_server(*common, "--endpoint", "wide").wait_ready()
    files = ("--input", str(source), "--output", str(tmp_path / "wide.jsonl"), "--order", "input")
    result = server.run("score", "--endpoint", "wide", *files, timeout_s=300)
    assert result.returncode == 0, result.stderr
    check_scores(tmp_path / "wide.jsonl", wanted)
    server.close()
    tight = start_server(*common, "--max-batch-tokens", "24", "--device-kv", "10M").wait_ready()
    command = [sys.executable, "-m", "fastserve_hpc", "score", "--endpoint", "default", "--input", str(source)]
    command += ["--output", str(tmp_path / "tight.jsonl"), "--order", "input", "--batch-slowdown", "8"]
    run = subprocess.Popen(command, env=tight.env, stderr=subprocess.PIPE, text=True)
    with Client(tight.endpoint_file()) as client:  # so close together that some line has always begun
        while run.poll() is None:
            client.generate("One word after the other, and so on. " * 12, max_tokens=30, ignore_eos=True)
    assert run.wait() == 0, run.communicate()[1]
    check_scores(tmp_path / "tight.jsonl", wanted)
    assert tight.status()["preemptions"] > 0


# 6. What lines have in common is computed once.


def test_show_6_examples_in_front_of_every_question_are_computed_once(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    server = start_server("--model", "fake", "--max-batch", "8").wait_ready()
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    examples = "".join(f"Question: how much is {i} and {i}? Answer: {2 * i}, of course.\n" for i in range(30))
    write_lines(source, [{"prompt": f"{examples}Question: how much is {i}?", "max_tokens": 5} for i in range(100)])
    files = ("--endpoint", "default", "--input", str(source), "--output", str(output))
    result = server.run("batch", *files, "--json")
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary["prefix_tokens"] >= 0.9 * summary["prompt_tokens"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_show_6_the_prefix_cache_doubles_the_pace() -> None:
    found = benchmark("batch_prefix.py", timeout_s=1700)
    assert found["reuse"] >= 0.9
    assert found["gain"] >= 2


# 7. The documentation, as a new user reads it.


def command_blocks() -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```", (REPOSITORY / "docs" / "batch.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_show_7_the_documentation_works_as_it_stands(start_server: Callable[..., Server], tmp_path: Path) -> None:
    """One block after the other. Slurm is not here: shards run one by one, on the server."""
    server = start_server("--model", "smollm2-135m", "--endpoint", "demo").wait_ready()
    program = tmp_path / "bin" / "fastserve-hpc"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m fastserve_hpc "$@"\n')
    program.chmod(0o755)
    path = os.pathsep.join([str(program.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    others = ("fastserve-hpc serve", "fastserve-hpc sbatch")
    blocks = [block for block in command_blocks() if not block.startswith(others)]
    assert len(blocks) >= 9
    for block in blocks:
        if block.startswith("#SBATCH --array=0-7"):
            of_one = block.replace("--model /models/llama", "--endpoint demo")
            block = f"for SLURM_ARRAY_TASK_ID in {{0..7}}; do\n{of_one}done"
        run = subprocess.run(["bash", "-ec", block], cwd=tmp_path, env={**server.env, "PATH": path},
                             capture_output=True, text=True, timeout=200)  # fmt: skip
        assert run.returncode == 0, f"{block}\n{run.stdout}\n{run.stderr}"
    assert [record["id"] for record in records(tmp_path / "whole.jsonl")] == ["batch_req_1", "batch_req_2"]
    for name in ("out", "attached", "scores", "answers", "verdicts", "stories.out", "logprobs.out"):
        assert all(record["error"] is None for record in records(tmp_path / f"{name}.jsonl"))
