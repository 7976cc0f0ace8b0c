"""Response bodies of /v1/completions and /v1/chat/completions.

Log-probabilities name tokens as "token_id:N": clients have no tokenizer, and ids are exact.
"""

from __future__ import annotations

from typing import Any

from fastserve_hpc.client.results import Choice, Generation
from fastserve_hpc.core.plan import TokenLogprobs
from fastserve_hpc.openai.bodies import Kind


def response_body(kind: Kind, generation: Generation, model: str, response_id: str, created: int) -> dict[str, Any]:
    """The body that the OpenAI API would answer with."""
    choice = _chat_choice if kind == "chat" else _completion_choice
    usage = generation.usage
    body: dict[str, Any] = {
        "id": response_id,
        "object": "chat.completion" if kind == "chat" else "text_completion",
        "created": created,
        "model": model,
        "choices": [choice(answer) for answer in generation.choices],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
    }
    if generation.prompt_logprobs:
        body["prompt_logprobs"] = [_prompt_logprob(entry) for entry in generation.prompt_logprobs]
    return body


def _completion_choice(answer: Choice) -> dict[str, Any]:
    return {
        "index": answer.index,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "logprobs": _completion_logprobs(answer.logprobs) if answer.logprobs else None,
    }


def _chat_choice(answer: Choice) -> dict[str, Any]:
    content = [
        {**_chat_logprob(entry.token_id, entry.logprob), "top_logprobs": [_chat_logprob(*pair) for pair in entry.top]}
        for entry in answer.logprobs
    ]
    return {
        "index": answer.index,
        "message": {"role": "assistant", "content": answer.text},
        "finish_reason": answer.finish_reason,
        "logprobs": {"content": content} if content else None,
    }


def _completion_logprobs(entries: list[TokenLogprobs]) -> dict[str, Any]:
    return {
        "tokens": [_name(entry.token_id) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [{_name(token_id): logprob for token_id, logprob in entry.top} for entry in entries],
    }


def _chat_logprob(token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": _name(token_id), "logprob": logprob, "bytes": None}


def _prompt_logprob(entry: TokenLogprobs | None) -> dict[str, float] | None:
    if entry is None:  # nothing comes before the first token
        return None
    return {_name(entry.token_id): entry.logprob} | {_name(token_id): value for token_id, value in entry.top}


def _name(token_id: int) -> str:
    return f"token_id:{token_id}"
