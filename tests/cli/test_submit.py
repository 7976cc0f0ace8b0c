from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from fake_client import FakeServer

from fastserve_hpc.client.results import Event
from fastserve_hpc.errors import RequestError
from fastserve_hpc.protocol import Usage

Run = Callable[..., Result]


def test_a_question_goes_through_the_chat_template_and_streams(run: Run, server: FakeServer) -> None:
    result = run("submit", "What now?", "--system", "Be brief.", "--max-tokens", "2")
    assert (result.exit_code, result.stdout) == (0, "echo What\n")
    assert server.requests == [
        {
            "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What now?"}],
            "n": 1,
            "max_tokens": 2,
        }
    ]


def test_raw_text_is_sent_as_it_is(run: Run, server: FakeServer) -> None:
    run("submit", "--raw", "Once upon", "--temperature", "0.5")
    assert server.requests == [{"prompt": "Once upon", "n": 1, "temperature": 0.5}]
    assert run("submit", "--raw", "Once", "--system", "x").exit_code == 2


def test_the_scheduler_is_told_what_is_known(run: Run, server: FakeServer) -> None:
    run("submit", "--raw", "x", "--session", "agent 7", "--expected-tokens", "40", "--class", "batch")
    told = {"session": "agent 7", "expected_tokens": 40, "service_class": "batch"}
    assert server.requests == [{"prompt": "x", "n": 1, **told}]
    assert run("submit", "x", "--expected-tokens", "0").exit_code == 2


@pytest.mark.parametrize("args", [(), ("-",)])
def test_the_prompt_comes_from_a_pipe(run: Run, server: FakeServer, args: tuple[str, ...]) -> None:
    assert run("submit", *args, input="from a pipe").exit_code == 0
    assert server.requests[0]["prompt"][-1]["content"] == "from a pipe"


def test_the_prompt_comes_from_a_file(run: Run, server: FakeServer, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("from a file é", encoding="utf-8")
    assert run("submit", "--file", str(file)).exit_code == 0
    assert server.requests[0]["prompt"][-1]["content"] == "from a file é"


def test_two_prompts_are_one_too_many(run: Run, server: FakeServer) -> None:
    result = run("submit", "one", "--prompt", "two")
    assert result.exit_code == 2
    assert "more than one prompt" in result.stderr
    assert server.requests == []


def test_json_holds_the_whole_answer(run: Run) -> None:
    result = run("submit", "a b", "--json", "--n", "2")
    answer = json.loads(result.stdout)
    assert answer["text"] == "echo a b"
    assert (answer["token_ids"], answer["finish_reason"]) == ([100, 101, 102], "stop")
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert (answer["prompt_tokens"], answer["output_tokens"]) == (2, 6)
    assert 0 <= answer["ttft_s"] <= answer["latency_s"]


def test_several_answers_are_shown_one_after_the_other(run: Run) -> None:
    assert run("submit", "a", "--n", "2").stdout == "--- 1 of 2\necho a\n--- 2 of 2\necho a\n"


def test_stats_are_appended(run: Run, tmp_path: Path) -> None:
    stats = tmp_path / "stats.jsonl"
    for _ in range(2):
        assert run("submit", "a b", "--stats", str(stats)).exit_code == 0
    lines = [json.loads(line) for line in stats.read_text().splitlines()]
    assert [line["output_tokens"] for line in lines] == [3, 3]


def test_the_server_is_found_by_name_or_job(run: Run, server: FakeServer) -> None:
    run("submit", "x", "--endpoint", "demo")
    run("submit", "x", "--job", "4711")
    run("submit", "x", env={"FASTSERVE_HPC_ENDPOINT": "other"})
    assert server.opened == [("demo", None), (None, "4711"), ("other", None)]


def test_a_refusal_is_one_line(run: Run, server: FakeServer) -> None:
    server.errors["long"] = [RequestError("the prompt has 9 tokens too many")]
    result = run("submit", "long")
    assert (result.exit_code, result.stderr) == (2, "error: the prompt has 9 tokens too many\n")


@pytest.mark.parametrize("args", [("",), (" \n",), ("-",), ()])
def test_an_empty_prompt_is_not_sent(run: Run, server: FakeServer, args: tuple[str, ...]) -> None:
    result = run("submit", *args, input="\n")
    assert (result.exit_code, result.stderr) == (2, "error: the prompt is empty\n")
    assert server.requests == []


def test_an_answer_that_the_server_did_not_finish(
    run: Run, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = [Event(0, "half an", [7], "cancelled", [], [], Usage(1, 1))]
    monkeypatch.setattr(server, "answer", lambda *_: cut)
    result = run("submit", "x")
    assert (result.exit_code, result.stdout) == (75, "half an\n")
    assert "the server ended before the answer was finished" in result.stderr
