from __future__ import annotations

from fastserve_hpc.client.results import Choice, Generation
from fastserve_hpc.core.plan import TokenLogprobs
from fastserve_hpc.openai.bodies import parse_body
from fastserve_hpc.openai.responses import response_body
from fastserve_hpc.protocol import Usage

COMPLETION = parse_body("completion", {"prompt": "x"})
CHAT = parse_body("chat", {"messages": [{"role": "user", "content": "x"}]})
LOGPROBS = [TokenLogprobs(5, -0.5, ((5, -0.5), (9, -1.5)))]


def generation(**fields: object) -> Generation:
    choices = [Choice(0, "Paris", [5], finish_reason="stop"), Choice(1, "Rome", [6], finish_reason="length")]
    result = Generation(choices, [], Usage(10, 2))
    for name, value in fields.items():
        setattr(result, name, value)
    return result


def test_a_completion_body() -> None:
    body = response_body(COMPLETION, generation(), "smol", "cmpl-1", 1700000000)
    assert body == {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1700000000,
        "model": "smol",
        "choices": [
            {"index": 0, "text": "Paris", "finish_reason": "stop", "logprobs": None},
            {"index": 1, "text": "Rome", "finish_reason": "length", "logprobs": None},
        ],
        "usage": {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12},
    }


def test_a_chat_body() -> None:
    body = response_body(CHAT, generation(), "smol", "chatcmpl-1", 0)
    assert body["object"] == "chat.completion"
    assert body["choices"][0] == {
        "index": 0,
        "message": {"role": "assistant", "content": "Paris"},
        "finish_reason": "stop",
        "logprobs": None,
    }


def test_logprobs_of_both_kinds_name_token_ids() -> None:
    answer = generation(choices=[Choice(0, "Paris", [5], LOGPROBS, "stop")])
    text = response_body(COMPLETION, answer, "smol", "x", 0)["choices"][0]["logprobs"]
    assert text == {
        "tokens": ["token_id:5"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"token_id:5": -0.5, "token_id:9": -1.5}],
    }
    (content,) = response_body(CHAT, answer, "smol", "x", 0)["choices"][0]["logprobs"]["content"]
    assert (content["token"], content["logprob"]) == ("token_id:5", -0.5)
    assert [top["token"] for top in content["top_logprobs"]] == ["token_id:5", "token_id:9"]


def test_prompt_logprobs_begin_with_nothing() -> None:
    answer = generation(prompt_logprobs=[None, *LOGPROBS])
    body = response_body(COMPLETION, answer, "smol", "x", 0)
    assert body["prompt_logprobs"] == [None, {"token_id:5": -0.5, "token_id:9": -1.5}]


def test_echo_puts_prompt_and_answer_together() -> None:
    ask = parse_body("completion", {"prompt": "Capital: ", "echo": True, "logprobs": 2})
    answer = generation(choices=[Choice(0, "Paris", [5], LOGPROBS, "stop")], prompt_logprobs=[None, *LOGPROBS])
    body = response_body(ask, answer, "smol", "x", 0)
    assert "prompt_logprobs" not in body
    (choice,) = body["choices"]
    assert choice["text"] == "Capital: Paris"
    assert choice["logprobs"] == {
        "tokens": [None, "token_id:5", "token_id:5"],
        "token_logprobs": [None, -0.5, -0.5],
        "top_logprobs": [None, *[{"token_id:5": -0.5, "token_id:9": -1.5}] * 2],
    }


def test_of_a_prompt_that_is_scored_only_the_sampled_token_is_left_out() -> None:
    ask = parse_body("completion", {"prompt": "Paris", "echo": True, "logprobs": 2, "max_tokens": 0})
    answer = generation(choices=[Choice(0, "x", [9], [], "stop")], prompt_logprobs=[None, *LOGPROBS])
    body = response_body(ask, answer, "smol", "x", 0)
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"], len(choice["logprobs"]["tokens"])) == ("Paris", "length", 2)
    assert body["usage"] == {"prompt_tokens": 10, "completion_tokens": 0, "total_tokens": 10}
