"""The calls that a client has open on one connection, and what has come for each. Knows no sockets."""

from __future__ import annotations

import dataclasses
import difflib
import operator
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from fastserve_hpc import protocol
from fastserve_hpc.core.request import SamplingParams, ServiceClass
from fastserve_hpc.errors import BusyError, EndpointError, FastServeError, RequestError
from fastserve_hpc.protocol import Alive, ChatMessage, Failed, ProtocolError, Submit, ToClient

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or chat messages as {"role": ..., "content": ...}."""


class Call:
    """One message to the server and the answers to it."""

    def __init__(self, id: int) -> None:
        self.id = id
        self.on_answer: Callable[[], None] = _nothing
        """Called when there is something to take."""
        self._answers: deque[ToClient] = deque()
        self._error: FastServeError | None = None

    def take(self) -> ToClient | None:
        """The next answer, None if it has not come. Raises what the server answered, or why there is no answer."""
        if self._answers:
            return self._answers.popleft()
        self.check()
        return None

    def check(self) -> None:
        """Raise why there will be no more answers, if so."""
        if self._error is not None:
            raise self._error

    def answer(self, message: ToClient) -> None:
        if isinstance(message, Failed):
            self.fail(error_of(message))
        else:
            self._answers.append(message)
            self.on_answer()

    def fail(self, error: FastServeError) -> None:
        """No more answers come, for this reason; those that came before can still be taken."""
        self._error = self._error or error
        self.on_answer()


class Calls:
    """Gives out ids and sorts what comes in."""

    def __init__(self) -> None:
        self._calls: dict[int, Call] = {}
        self._next_id = 1

    @property
    def open_ids(self) -> list[int]:
        return list(self._calls)

    def open(self) -> Call:
        call = self._calls[self._next_id] = Call(self._next_id)
        self._next_id += 1
        return call

    def close(self, call: Call) -> bool:
        """Take in no more for it; whether it was open."""
        return self._calls.pop(call.id, None) is not None

    def sort_in(self, frames: list[bytes]) -> None:
        """Hand a message to its call. Raises `EndpointError` if it is none, or a complaint about what we sent."""
        try:
            message = protocol.decode_to_client(frames)
        except ProtocolError as error:
            raise EndpointError(f"the server sent what is no message: {error}") from None
        if isinstance(message, Alive):
            return
        if isinstance(message, Failed) and message.id == protocol.NO_ID:
            raise EndpointError(f"the server does not understand this client: {message.message}")
        if call := self._calls.get(message.id):  # else: an answer that crossed our cancel
            call.answer(message)

    def fail_all(self, error: FastServeError) -> None:
        """Close all calls with the same error."""
        calls, self._calls = list(self._calls.values()), {}
        for call in calls:
            call.fail(error)


def error_of(failed: Failed) -> FastServeError:
    """The exception that a refusal becomes."""
    if failed.code == "busy":
        return BusyError(failed.message)
    if failed.code == "ended":
        return EndpointError(failed.message)
    return RequestError(failed.message, failed.code)


def make_submit(
    prompt: Prompt,
    *,
    stream: bool,
    model: str | None = None,
    service_class: ServiceClass = "interactive",
    session: str | None = None,
    expected_tokens: int | None = None,
    slowdown: float | None = None,
    continuation: str | Sequence[int] | None = None,
    **sampling: Any,
) -> Submit:
    """The message that asks for a generation, without its id.

    Raises `RequestError` where the prompt is of none of the kinds, `TypeError` for an unknown parameter.
    """
    text_or_ids, messages = _split(prompt)
    return Submit(
        id=protocol.NO_ID,
        prompt=text_or_ids,
        messages=messages,
        sampling=_sampling(sampling),
        model=model,
        stream=stream,
        service_class=service_class,
        session=session,
        expected_tokens=expected_tokens,
        slowdown=slowdown,
        continuation=_continuation(continuation),
    )


def encoded(message: protocol.ToServer, id: int) -> list[bytes]:
    """The frames of a message under this id. Raises `RequestError` where a value cannot be sent."""
    try:
        frames = protocol.encode(msgspec.structs.replace(message, id=id))
    except UnicodeEncodeError:
        raise RequestError("a text of the request is not Unicode and cannot be sent: is it UTF-8?") from None
    except (OverflowError, TypeError, ValueError) as error:  # ids over 64 bits, objects
        raise RequestError(f"a value of the request cannot be sent: {error}") from None
    if (size := len(frames[1])) > protocol.MAX_MESSAGE_BYTES:
        raise RequestError(f"the request has {size} bytes: at most {protocol.MAX_MESSAGE_BYTES} are allowed")
    return frames


def _split(prompt: Prompt) -> tuple[str | list[int] | None, list[ChatMessage] | None]:
    if isinstance(prompt, str):
        return prompt, None
    if not isinstance(prompt, Iterable):
        raise RequestError(f"the prompt is {prompt!r}: it must be text, token ids or chat messages")
    items: list[Any] = list(prompt)
    if items and isinstance(items[0], Mapping):
        return None, [_chat_message(i, item) for i, item in enumerate(items)]
    return [_token_id(i, item) for i, item in enumerate(items)], None


def _continuation(continuation: str | Sequence[int] | None) -> str | list[int] | None:
    if continuation is None or isinstance(continuation, str):
        return continuation
    token_ids, messages = _split(continuation)
    if messages is not None:
        raise RequestError("the continuation must be text or token ids")
    return token_ids


def _chat_message(position: int, message: Any) -> ChatMessage:
    try:
        role, content = message["role"], message["content"]
    except (KeyError, TypeError):
        raise RequestError(f"messages[{position}] is {message!r}: it must have 'role' and 'content'") from None
    if not isinstance(role, str) or not isinstance(content, str):
        raise RequestError(f"messages[{position}] is {message!r}: role and content must be text")
    return ChatMessage(role, content)


def _token_id(position: int, token_id: Any) -> int:
    try:
        number = operator.index(token_id)
    except TypeError:
        raise RequestError(f"prompt[{position}] is {token_id!r}: token ids are integers") from None
    if not -(2**63) <= number < 2**63:
        raise RequestError(f"prompt[{position}] is {number}: token ids are integers of at most 63 bits")
    return number


def _sampling(values: Mapping[str, Any]) -> SamplingParams:
    _check_names(values)
    values = dict(values)
    if isinstance(stop := values.get("stop"), str):
        values["stop"] = (stop,)
    for name in ("stop", "stop_token_ids"):
        if isinstance(given := values.get(name, ()), Iterable) or given is None:
            values[name] = tuple(given or ())  # what is neither is refused by the server
    return SamplingParams(**values)


def _check_names(values: Mapping[str, Any]) -> None:
    for name in values:
        if name not in _SAMPLING_NAMES:
            similar = difflib.get_close_matches(name, (*_SAMPLING_NAMES, *_SUBMIT_NAMES), 1)
            cure = f"did you mean {similar[0]}?" if similar else f"there are {', '.join(_SAMPLING_NAMES)}"
            raise TypeError(f"{name} is no parameter of a request: {cure}")


_SAMPLING_NAMES = tuple(field.name for field in dataclasses.fields(SamplingParams))
_SUBMIT_NAMES = ("model", "service_class", "session", "expected_tokens", "slowdown")


def _nothing() -> None:
    pass
