from __future__ import annotations

from typing import Any

import pytest

from fastserve_hpc.core.request import SamplingParams
from fastserve_hpc.errors import RequestError
from fastserve_hpc.openai.bodies import field_names, parse_body

HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": HELLO, **fields}


def test_a_plain_body_is_all_defaults() -> None:
    ask = parse_body("completion", {"prompt": "Once"})
    assert (ask.kind, ask.prompt, ask.model) == ("completion", "Once", None)
    assert ask.sampling == SamplingParams()


def test_every_sampling_field_arrives() -> None:
    fields = {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "seed": 7,
        "n": 3,
        "ignore_eos": True,
        "prompt_logprobs": 1,
    }
    sampling = parse_body("completion", {"prompt": [1, 2], **fields}).sampling
    assert {name: getattr(sampling, name) for name in fields} == fields


@pytest.mark.parametrize(("kind", "body"), [("completion", {"prompt": "Once"}), ("chat", chat())])
def test_what_the_scheduler_may_know(kind: Any, body: dict[str, Any]) -> None:
    assert parse_body(kind, body).hints == {}
    ask = parse_body(kind, {**body, "session": "agent 7", "expected_tokens": 40})
    assert ask.hints == {"session": "agent 7", "expected_tokens": 40}
    with pytest.raises(RequestError, match="expected_tokens"):
        parse_body(kind, {**body, "expected_tokens": "long"})


def test_lists_and_keys_are_translated() -> None:
    body = chat(logit_bias={"12": -5, "7": 1.5}, stop="END", stop_token_ids=[3, 4], model="smollm2-135m")
    ask = parse_body("chat", body)
    assert ask.sampling.logit_bias == {12: -5.0, 7: 1.5}
    assert ask.sampling.stop == ("END",)
    assert ask.sampling.stop_token_ids == (3, 4)
    assert ask.model == "smollm2-135m"
    assert parse_body("chat", chat(stop=["a", "b"])).sampling.stop == ("a", "b")


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        ("chat", {"logprobs": True, "top_logprobs": 3}, 3),
        ("chat", {"logprobs": True}, 0),
        ("chat", {"logprobs": False}, None),
        ("completion", {"logprobs": 2}, 2),
    ],
)
def test_logprobs_of_both_kinds(kind: Any, fields: dict[str, Any], expected: int | None) -> None:
    body = chat(**fields) if kind == "chat" else {"prompt": "x", **fields}
    assert parse_body(kind, body).sampling.logprobs == expected


def test_max_completion_tokens_is_the_newer_name() -> None:
    assert parse_body("chat", chat(max_completion_tokens=5, max_tokens=9)).sampling.max_tokens == 5
    assert parse_body("chat", chat(max_tokens=9)).sampling.max_tokens == 9


def test_other_servers_minus_one_means_no_top_k() -> None:
    assert parse_body("chat", chat(top_k=-1)).sampling.top_k == 0


def test_text_parts_are_joined_and_other_parts_refused() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    ask = parse_body("chat", {"messages": [{"role": "user", "content": parts}]})
    assert ask.prompt == [{"role": "user", "content": "ab"}]
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(RequestError, match="image_url"):
        parse_body("chat", {"messages": [{"role": "user", "content": image}]})


@pytest.mark.parametrize("prompt", [["one text"], [[1, 2, 3]]])
def test_a_list_of_one_prompt_is_that_prompt(prompt: list[Any]) -> None:
    assert parse_body("completion", {"prompt": prompt}).prompt == prompt[0]


@pytest.mark.parametrize(
    ("kind", "body", "named"),
    [
        ("completion", {"prompt": ["a", "b"]}, "prompt"),
        ("completion", {"prompt": [1, True]}, "prompt"),
        ("completion", {}, "prompt"),
        ("completion", {"prompt": "x", "max_tokens": 0, "echo": True, "n": 2}, "max_tokens"),
        ("chat", chat(echo=True), "echo"),
        ("completion", {"prompt": "x", "best_of": 3}, "best_of"),
        ("completion", {"prompt": "x", "max_tokens": "5"}, "max_tokens"),
        ("completion", {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ("completion", {"prompt": "x", "temperature": float("nan")}, "temperature"),
        ("completion", {"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
        ("chat", {"messages": []}, "messages"),
        ("chat", {"messages": "hello"}, "messages"),
        ("chat", chat(max_completion_tokens=0), "max_tokens"),
        ("chat", chat(stream=True), "stream"),
        ("chat", chat(tools=[{"type": "function"}]), "tools"),
        ("chat", chat(response_format={"type": "json_object"}), "response_format"),
        ("chat", chat(top_logprobs=2), "top_logprobs"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(kind: Any, body: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        parse_body(kind, body)


def test_fields_that_change_nothing_are_ignored() -> None:
    body = chat(user="u", metadata={"a": "b"}, store=True, tools=[], best_of=1, stream=False)
    neutral = chat(response_format={"type": "text"}, echo=False)
    assert parse_body("chat", body) == parse_body("chat", neutral) == parse_body("chat", chat())


def test_field_names_tell_the_kinds_apart() -> None:
    assert "messages" in field_names("chat")
    assert "messages" not in field_names("completion")
    assert {"top_k", "seed"} <= field_names("completion")


def test_scores_of_a_prompt_are_asked_for_with_one_token_to_throw_away() -> None:
    ask = parse_body("completion", {"prompt": "x", "echo": True, "logprobs": 3, "max_tokens": 0})
    assert (ask.echo, ask.scores_only) == (True, True)
    assert (ask.sampling.max_tokens, ask.sampling.prompt_logprobs, ask.sampling.logprobs) == (1, 3, None)
    ask = parse_body("completion", {"prompt": "x", "echo": True, "logprobs": 3, "max_tokens": 7})
    assert (ask.echo, ask.scores_only) == (True, False)
    assert (ask.sampling.max_tokens, ask.sampling.prompt_logprobs, ask.sampling.logprobs) == (7, 3, 3)
