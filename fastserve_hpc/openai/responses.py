"""Response bodies of /v1/completions and /v1/chat/completions.

Log-probabilities name tokens as "token_id:N": clients have no tokenizer, and ids are exact.
"""

from __future__ import annotations

from typing import Any

from fastserve_hpc.client.results import Choice, Generation
from fastserve_hpc.core.plan import TokenLogprobs
from fastserve_hpc.openai.bodies import Ask


def response_body(ask: Ask, generation: Generation, model: str, response_id: str, created: int) -> dict[str, Any]:
    """The body that the OpenAI API would answer with."""
    is_chat = ask.kind == "chat"
    num_prompt_tokens = generation.usage.prompt_tokens
    num_tokens = 0 if ask.scores_only else generation.usage.completion_tokens
    body: dict[str, Any] = {
        "id": response_id,
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [
            _chat_choice(answer) if is_chat else _completion_choice(ask, generation, answer)
            for answer in generation.choices
        ],
        "usage": {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
        },
    }
    if generation.prompt_logprobs and not ask.echo:
        body["prompt_logprobs"] = [_prompt_logprob(entry) for entry in generation.prompt_logprobs]
    return body


def _completion_choice(ask: Ask, generation: Generation, answer: Choice) -> dict[str, Any]:
    text = ask.prompt if ask.echo and isinstance(ask.prompt, str) else ""
    entries: list[TokenLogprobs | None] = list(generation.prompt_logprobs) if ask.echo else []
    if not ask.scores_only:
        text, entries = text + answer.text, [*entries, *answer.logprobs]
    return {
        "index": answer.index,
        "text": text,
        "finish_reason": "length" if ask.scores_only else answer.finish_reason,
        "logprobs": _completion_logprobs(entries) if entries else None,
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


def _completion_logprobs(entries: list[TokenLogprobs | None]) -> dict[str, Any]:
    """None stands for the first token of a prompt, which nothing comes before; without a tokenizer not even its id
    is known.
    """
    return {
        "tokens": [entry and _name(entry.token_id) for entry in entries],
        "token_logprobs": [entry and entry.logprob for entry in entries],
        "top_logprobs": [entry and {_name(token_id): logprob for token_id, logprob in entry.top} for entry in entries],
    }


def _chat_logprob(token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": _name(token_id), "logprob": logprob, "bytes": None}


def _prompt_logprob(entry: TokenLogprobs | None) -> dict[str, float] | None:
    if entry is None:  # nothing comes before the first token
        return None
    return {_name(entry.token_id): entry.logprob} | {_name(token_id): value for token_id, value in entry.top}


def _name(token_id: int) -> str:
    return f"token_id:{token_id}"
