"""Response bodies of /v1/completions and /v1/chat/completions.

Log-probabilities name tokens as "token_id:N": clients have no tokenizer, and ids are exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fastserve_hpc.core.plan import TokenLogprobs
from fastserve_hpc.openai.bodies import Kind


@dataclass(slots=True)
class Answer:
    """One choice of a request, gathered from its deltas."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class Answers:
    """All choices of a request, by number."""

    choices: dict[int, Answer] = field(default_factory=dict)
    prompt_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)

    @property
    def completion_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.choices.values())

    def take(self, event: Any) -> None:
        """Take in the next event of a client's stream."""
        answer = self.choices.setdefault(event.choice, Answer())
        answer.text += event.text
        answer.token_ids.extend(event.token_ids)
        answer.logprobs.extend(event.logprobs or ())
        answer.finish_reason = event.finish_reason or answer.finish_reason
        if event.usage is not None:
            self.prompt_tokens = event.usage.prompt_tokens
        if event.prompt_logprobs and event.choice == 0:
            self.prompt_logprobs.extend(event.prompt_logprobs)


def response_body(kind: Kind, answers: Answers, model: str, response_id: str, created: int) -> dict[str, Any]:
    """The body that the OpenAI API would answer with."""
    choice = _chat_choice if kind == "chat" else _completion_choice
    body = {
        "id": response_id,
        "object": "chat.completion" if kind == "chat" else "text_completion",
        "created": created,
        "model": model,
        "choices": [choice(index, answer) for index, answer in sorted(answers.choices.items())],
        "usage": {
            "prompt_tokens": answers.prompt_tokens,
            "completion_tokens": answers.completion_tokens,
            "total_tokens": answers.prompt_tokens + answers.completion_tokens,
        },
    }
    if answers.prompt_logprobs:
        body["prompt_logprobs"] = [entry and _prompt_logprob(entry) for entry in answers.prompt_logprobs]
    return body


def _completion_choice(index: int, answer: Answer) -> dict[str, Any]:
    return {
        "index": index,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "logprobs": _completion_logprobs(answer.logprobs) if answer.logprobs else None,
    }


def _chat_choice(index: int, answer: Answer) -> dict[str, Any]:
    content = [
        {**_chat_logprob(entry.token_id, entry.logprob), "top_logprobs": [_chat_logprob(*pair) for pair in entry.top]}
        for entry in answer.logprobs
    ]
    return {
        "index": index,
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


def _prompt_logprob(entry: TokenLogprobs) -> dict[str, float]:
    return {_name(entry.token_id): entry.logprob} | {_name(token_id): value for token_id, value in entry.top}


def _name(token_id: int) -> str:
    return f"token_id:{token_id}"
