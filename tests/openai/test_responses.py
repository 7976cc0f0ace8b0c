from __future__ import annotations

from fastserve_hpc.client.results import Choice, Generation
from fastserve_hpc.core.plan import TokenLogprobs
from fastserve_hpc.openai.responses import response_body
from fastserve_hpc.protocol import Usage

LOGPROBS = [TokenLogprobs(5, -0.5, ((5, -0.5), (9, -1.5)))]


def generation(**fields: object) -> Generation:
    choices = [Choice(0, "Paris", [5], finish_reason="stop"), Choice(1, "Rome", [6], finish_reason="length")]
    result = Generation(choices, [], Usage(10, 2))
    for name, value in fields.items():
        setattr(result, name, value)
    return result


def test_a_completion_body() -> None:
    body = response_body("completion", generation(), "smol", "cmpl-1", 1700000000)
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
    body = response_body("chat", generation(), "smol", "chatcmpl-1", 0)
    assert body["object"] == "chat.completion"
    assert body["choices"][0] == {
        "index": 0,
        "message": {"role": "assistant", "content": "Paris"},
        "finish_reason": "stop",
        "logprobs": None,
    }


def test_logprobs_of_both_kinds_name_token_ids() -> None:
    answer = generation(choices=[Choice(0, "Paris", [5], LOGPROBS, "stop")])
    text = response_body("completion", answer, "smol", "x", 0)["choices"][0]["logprobs"]
    assert text == {
        "tokens": ["token_id:5"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"token_id:5": -0.5, "token_id:9": -1.5}],
    }
    (content,) = response_body("chat", answer, "smol", "x", 0)["choices"][0]["logprobs"]["content"]
    assert (content["token"], content["logprob"]) == ("token_id:5", -0.5)
    assert [top["token"] for top in content["top_logprobs"]] == ["token_id:5", "token_id:9"]


def test_prompt_logprobs_begin_with_nothing() -> None:
    answer = generation(prompt_logprobs=[None, *LOGPROBS])
    body = response_body("completion", answer, "smol", "x", 0)
    assert body["prompt_logprobs"] == [None, {"token_id:5": -0.5, "token_id:9": -1.5}]
