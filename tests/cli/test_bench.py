from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result
from fake_client import FakeServer

from fastserve_hpc.errors import RequestError

Run = Callable[..., Result]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    lines = [{"arrival_s": i / 100, "prompt_tokens": 10 * (i + 1), "output_tokens": 20} for i in range(10)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_json_report_of_a_cut_trace(run: Run, server: FakeServer, trace: str) -> None:
    result = run("bench", "--endpoint", "demo", "--trace", trace, "--requests", "4", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["requests"], report["failed"]) == (4, 0)
    assert [len(request["prompt"]) for request in server.requests] == [10, 20, 30, 40]


def test_what_does_not_fit_the_context_is_cut_and_counted(run: Run, server: FakeServer, trace: str) -> None:
    result = run("bench", "--trace", trace, "--offline", "--json")
    assert "2 of 10 requests are longer than the context of 100" in result.stderr
    assert [len(request["prompt"]) for request in server.requests[-3:]] == [80, 80, 80]


def test_lengths_can_be_scaled(run: Run, server: FakeServer, trace: str) -> None:
    result = run("bench", "--trace", trace, "--offline", "--scale-lengths", "0.5", "--json")
    assert "longer than the context" not in result.stderr
    assert {request["max_tokens"] for request in server.requests} == {10}


def test_a_table_for_people(run: Run, trace: str) -> None:
    output = run("bench", "--trace", trace, "--requests", "3", "--rate", "100").stdout
    assert "3 requests (0 failed)" in output
    assert "normalized_latency" in output


def test_what_the_server_counted_meanwhile_is_told(
    run: Run, server: FakeServer, trace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.status = replace(server.status, details={"offloaded_bytes": 1e6, "recomputed_tokens": 5.0})
    answer = server.answer

    def counting(prompt: object, options: dict[str, object]) -> object:
        moved = {"offloaded_bytes": server.status.details["offloaded_bytes"] + 2e6, "recomputed_tokens": 5.0}
        server.status = replace(server.status, preemptions=server.status.preemptions + 1, details=moved)
        return answer(prompt, options)

    monkeypatch.setattr(server, "answer", counting)
    command = ("bench", "--trace", trace, "--requests", "3", "--rate", "100")
    assert json.loads(run(*command, "--json").stdout)["counted"] == {
        "preemptions": 3.0,
        "offloaded_bytes": 6e6,
        "recomputed_tokens": 0.0,
    }
    assert "meanwhile the server counted 3 preemptions, 6.0 MB of KV offloaded\n" in run(*command).stdout


def test_prompts_stay_in_the_vocabulary(run: Run, server: FakeServer, trace: str) -> None:
    server.status = replace(server.status, vocab_size=40)
    run("bench", "--trace", trace, "--requests", "2")
    assert all(0 <= token_id < 40 for request in server.requests for token_id in request["prompt"])


def test_failures_are_said_and_exit_3(run: Run, server: FakeServer, trace: str) -> None:
    server.errors["ids"] = [RequestError("no room")]
    result = run("bench", "--trace", trace, "--requests", "2", "--json")
    assert result.exit_code == 3
    assert "no room" in result.stderr
    assert json.loads(result.stdout)["failed"] == 1


def test_offline_and_rate_exclude_each_other(run: Run, trace: str) -> None:
    assert run("bench", "--trace", trace, "--offline", "--rate", "2").exit_code == 2
