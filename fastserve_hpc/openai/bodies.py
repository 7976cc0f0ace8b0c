"""Request bodies of /v1/completions and /v1/chat/completions, and what they ask for.

The fields of the OpenAI API and the usual extras of open servers (top_k, min_p, repetition_penalty,
min_tokens, ignore_eos, stop_token_ids, prompt_logprobs), and what the scheduler may know: session and
expected_tokens. Fields that would change the answer but
are not supported are refused; all others that we do not know are ignored. A temperature that is
left out is greedy.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from fastserve_hpc.core.request import SamplingParams
from fastserve_hpc.errors import RequestError

Kind = Literal["chat", "completion", "score"]
Prompt = str | list[int] | list[dict[str, str]]

_REFUSED = (
    "tools",
    "functions",
    "best_of",
    "suffix",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "response_format",
    "audio",
    "prefix",
    "bad_words",
    "use_beam_search",
)
"""Fields that change the answer and are not supported; neutral values of them pass."""

_NEUTRAL: tuple[Any, ...] = (None, False, "", [], {}, {"type": "text"})


class TextPart(msgspec.Struct, frozen=True):
    """One part of a message's content; only text is understood."""

    type: str
    text: str = ""


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str | list[TextPart]

    def as_dict(self) -> dict[str, str]:
        """Role and plain text. Raises `RequestError` on parts that are no text."""
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        other = next((part.type for part in self.content if part.type != "text"), None)
        if other is not None:
            raise RequestError(f"a message has a part of type {other!r}: only text is supported")
        return {"role": self.role, "content": "".join(part.text for part in self.content)}


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """What both kinds of body have in common. None is the default of `SamplingParams`."""

    model: str | None = None
    stream: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    session: str | None = None
    """Requests of one session that are there together count as one to the scheduler."""
    expected_tokens: int | None = None
    """How long the answer will be, as far as the client knows."""


class CompletionBody(SamplingFields, frozen=True, kw_only=True):
    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None


class ChatBody(SamplingFields, frozen=True, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """What a body asks for: a prompt (text, token ids or chat messages) and how to answer it."""

    kind: Kind
    prompt: Prompt
    sampling: SamplingParams
    model: str | None = None
    echo: bool = False
    """Whether the answer begins with the prompt and, if log-probabilities are wanted, with its."""
    scores_only: bool = False
    """Whether nothing is to be generated (max_tokens 0). The engine then samples one token, which costs nothing
    beside the prompt, and the response leaves it out."""
    continuation: str | list[int] | None = None
    """Kind "score": what is scored after the prompt."""
    session: str | None = None
    expected_tokens: int | None = None

    @property
    def hints(self) -> dict[str, Any]:
        """What the client says to the scheduler, as the keywords that a client takes; only what was given."""
        given = {"session": self.session, "expected_tokens": self.expected_tokens}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def wants_output(self) -> bool:
        """Whether anything that is generated counts."""
        return not (self.scores_only or self.kind == "score")


def parse_body(kind: Kind, body: dict[str, Any]) -> Ask:
    """The meaning of a request body. Raises `RequestError` naming the field that is wrong."""
    _refuse_unsupported(body)
    if kind == "chat":
        if body.get("echo"):
            raise RequestError("echo is not supported in a chat: leave it out", code="unsupported")
        chat = _convert(body, ChatBody)
        if not chat.messages:
            raise RequestError("messages is empty: it must hold at least 1 message")
        messages = [message.as_dict() for message in chat.messages]
        hints: dict[str, Any] = {"session": chat.session, "expected_tokens": chat.expected_tokens}
        return Ask(kind, messages, _chat_sampling(chat), chat.model, **hints)
    return _completion_ask(_convert(body, CompletionBody))


def _completion_ask(body: CompletionBody) -> Ask:
    echo, scores_only = bool(body.echo), body.max_tokens == 0
    values: dict[str, Any] = {"logprobs": body.logprobs}
    if echo and body.logprobs is not None:
        values["prompt_logprobs"] = body.logprobs
    if scores_only:
        if not echo or (body.n or 1) != 1:
            raise RequestError("max_tokens is 0: that returns the prompt's scores, which needs echo: true and n 1")
        values |= {"max_tokens": 1, "logprobs": None}
    sampling = _sampling(body, **values)
    hints: dict[str, Any] = {"session": body.session, "expected_tokens": body.expected_tokens}
    return Ask("completion", _prompt(body.prompt), sampling, body.model, echo, scores_only, **hints)


class ScoreBody(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `score`. Both are text, or token ids."""

    context: str | list[int]
    continuation: str | list[int]
    model: str | None = None


def parse_score(body: dict[str, Any]) -> Ask:
    """The meaning of a line of `score`. Raises `RequestError` naming the field that is wrong."""
    found = _convert(body, ScoreBody)
    return Ask("score", found.context, SamplingParams(), found.model, continuation=found.continuation)


def field_names(kind: Kind) -> frozenset[str]:
    """All fields of a body that mean something to us."""
    structs: dict[Kind, type[Any]] = {"chat": ChatBody, "completion": CompletionBody, "score": ScoreBody}
    return frozenset(structs[kind].__struct_fields__)


def _convert(body: dict[str, Any], struct: type[Any]) -> Any:
    try:
        return msgspec.convert(body, struct, str_keys=True)
    except msgspec.ValidationError as error:
        raise RequestError(str(error).replace("`$.", "`")) from None


def _refuse_unsupported(body: dict[str, Any]) -> None:
    if body.get("stream"):
        raise RequestError("stream is true: results are written whole, leave it out")
    for name in _REFUSED:
        neutral = body.get(name) in _NEUTRAL or (name == "best_of" and body[name] == 1)
        if not neutral:
            raise RequestError(f"{name} is not supported: leave it out", code="unsupported")


def _prompt(prompt: str | list[Any]) -> str | list[int]:
    """One prompt: text, token ids, or a list of just one of these."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        return _prompt(prompt[0])
    if all(type(token_id) is int for token_id in prompt):
        return prompt
    raise RequestError("prompt must be one text or one list of token ids; write several prompts as several requests")


def _chat_sampling(chat: ChatBody) -> SamplingParams:
    logprobs = (chat.top_logprobs or 0) if chat.logprobs else None
    if chat.top_logprobs and not chat.logprobs:
        raise RequestError("top_logprobs needs logprobs: true")
    max_tokens = chat.max_tokens if chat.max_completion_tokens is None else chat.max_completion_tokens
    return _sampling(chat, logprobs=logprobs, max_tokens=max_tokens)


_SAME = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "n",
    "ignore_eos",
    "prompt_logprobs",
)
"""Fields that body and `SamplingParams` share by name and meaning."""


def _sampling(fields: SamplingFields, **overrides: Any) -> SamplingParams:
    values = {name: getattr(fields, name) for name in _SAME} | overrides
    if values["top_k"] == -1:  # how other servers write "no limit"
        values["top_k"] = 0
    stop = [fields.stop] if isinstance(fields.stop, str) else fields.stop
    values |= {"stop": tuple(stop or ()), "stop_token_ids": tuple(fields.stop_token_ids or ())}
    given = tuple([(name, value) for name, value in values.items() if value is not None])
    return _params(given) if fields.logit_bias is None else _params.__wrapped__(given)  # a dict has no hash


@functools.lru_cache(maxsize=64)
def _params(given: tuple[tuple[str, Any], ...]) -> SamplingParams:
    """The same object for the same values: the lines of a batch file seldom differ, and checking takes a while."""
    params = SamplingParams(**dict(given))
    params.validate()
    return params
