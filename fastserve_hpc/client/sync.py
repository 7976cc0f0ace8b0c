"""The client for plain scripts. It has no threads: it reads from the server while it waits for an answer."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from types import TracebackType
from typing import Any

import zmq

from fastserve_hpc.client.base import ClientBase, StreamState, answer_as
from fastserve_hpc.client.calls import Call, Prompt, encoded, make_submit
from fastserve_hpc.client.connection import Connection
from fastserve_hpc.client.results import Collector, Event, Generation, Score
from fastserve_hpc.core.engine import EngineStatus
from fastserve_hpc.core.request import ServiceClass
from fastserve_hpc.errors import EndpointError
from fastserve_hpc.protocol import NO_ID, Drain, Draining, StatusQuery, StatusReply, ToClient, ToServer

_POLL_S = 1.0


class Client(ClientBase):
    """A connection to a running server, for one thread at a time; give each thread its own.

    Several streams may be open at once. A lost connection ends them with `EndpointError`; the next
    call connects anew.
    """

    def __init__(
        self,
        endpoint: str | os.PathLike[str] | None = None,
        *,
        job: str | int | None = None,
        connect_timeout_s: float = 10.0,
        silence_s: float = 30.0,
    ) -> None:
        """As `ClientBase`, and connects: raises `EndpointError` if the server does not answer either."""
        super().__init__(endpoint, job=job, connect_timeout_s=connect_timeout_s, silence_s=silence_s)
        self._poller = zmq.Poller()
        self._abandoned: deque[Call] = deque()
        self._thread = threading.get_ident()
        self._connected()

    def generate(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        service_class: ServiceClass = "interactive",
        session: str | None = None,
        expected_tokens: int | None = None,
        **sampling: Any,
    ) -> Generation:
        """Wait for the whole answer; `sampling` are the fields of `SamplingParams`.

        Raises `RequestError` if it is refused, `BusyError` if it may be sent again later, `EndpointError`
        if the server is lost. Ctrl-C cancels it.
        """
        options = {"model": model, "service_class": service_class, "session": session}
        with self._submit(prompt, stream=False, expected_tokens=expected_tokens, **options, **sampling) as stream:
            return Collector(stream.num_choices).add_all(stream)

    def stream(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        service_class: ServiceClass = "interactive",
        session: str | None = None,
        expected_tokens: int | None = None,
        **sampling: Any,
    ) -> Stream:
        """The answer as it comes. The request is sent at once; closing or dropping the stream cancels it."""
        options = {"model": model, "service_class": service_class, "session": session}
        return self._submit(prompt, stream=True, expected_tokens=expected_tokens, **options, **sampling)

    def score(
        self,
        context: str | list[int],
        continuation: str | list[int],
        *,
        model: str | None = None,
        service_class: ServiceClass = "interactive",
    ) -> Score:
        """How likely the model finds a continuation, as lm-evaluation-harness defines it: both are tokenised together,
        white space at the context's end counts with the continuation, an empty context is the token that begins texts.

        Raises as `generate`.
        """
        options: dict[str, Any] = {"model": model, "service_class": service_class}
        return Score.of(self.generate(context, continuation=continuation, **options))

    def status(self) -> EngineStatus:
        """What the server is doing."""
        return answer_as(self._ask(StatusQuery(NO_ID)), StatusReply).status

    def drain(self, now: bool = False) -> None:
        """Ask the server to end: after what it has taken or, with `now`, without finishing it."""
        answer_as(self._ask(Drain(NO_ID, now)), Draining)

    def close(self) -> None:
        """Cancel what runs and disconnect. Idempotent; a later call connects anew."""
        connection = self._connection
        if connection is not None:
            self._cancel_all()
            self._connection = None
            self._release(connection)
            connection.close()
        self._calls.fail_all(EndpointError("the client was closed"))

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submit(self, prompt: Prompt, **options: Any) -> Stream:
        submit = make_submit(prompt, **options)
        return Stream(self, self._open(submit), StreamState(submit))

    def _ask(self, question: ToServer) -> ToClient:
        call = self._open(question)
        try:
            return self._next(call)
        finally:
            self._calls.close(call)

    def _open(self, message: ToServer) -> Call:
        """Send a message; the call that takes the answers. Raises `RequestError` or `EndpointError`."""
        connection = self._connected()
        call = self._calls.open()
        try:
            frames = encoded(message, call.id)
            waits_since = time.monotonic()
            while not connection.send(frames):
                self._wait(connection, zmq.POLLIN | zmq.POLLOUT)
                self._check_silence(waits_since)
                call.check()
        except BaseException:
            self._cancel(call)
            raise
        return call

    def _next(self, call: Call) -> ToClient:
        """The next answer to a call. Raises what the server answered, or `EndpointError`."""
        waits_since = time.monotonic()
        while (answer := call.take()) is None:
            if self._connection is None:
                raise EndpointError("the client was closed")
            self._wait(self._connection, zmq.POLLIN)
            self._check_silence(waits_since)
        return answer

    def _wait(self, connection: Connection, events: int) -> None:
        """Take in what comes, for a moment."""
        self._poller.register(connection.socket, events)
        self._poller.poll(int(min(_POLL_S, self._silence_s) * 1000))
        self._take_in()
        self._cancel_abandoned()

    def _connected(self) -> Connection:
        """The connection, made anew if it was lost since the last call."""
        self._take_in()
        if self._connection is None:
            self._adopt(self._open_connection())
        assert self._connection is not None
        return self._connection

    def _adopt(self, connection: Connection) -> None:
        super()._adopt(connection)
        self._poller.register(connection.monitor, zmq.POLLIN)

    def _release(self, connection: Connection) -> None:
        super()._release(connection)
        self._poller = zmq.Poller()

    def _abandon(self, call: Call) -> None:
        """Cancel a call, from any thread: the garbage collector may run in another one."""
        self._abandoned.append(call)
        if threading.get_ident() == self._thread:
            self._cancel_abandoned()

    def _cancel_abandoned(self) -> None:
        while self._abandoned:
            self._cancel(self._abandoned.popleft())


class Stream:
    """Iterates over the events of one request."""

    def __init__(self, client: Client, call: Call, state: StreamState) -> None:
        self._client = client
        self._call = call
        self._state = state

    @property
    def num_choices(self) -> int:
        return self._state.num_choices

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Event:
        """Raises what the server answered, or `EndpointError`. After Ctrl-C the stream may go on."""
        if self._state.num_open == 0:
            raise StopIteration
        try:
            event = self._state.take(self._client._next(self._call))
        except Exception:
            self.close()
            raise
        if self._state.num_open == 0:
            self._client._calls.close(self._call)
        return event

    def close(self) -> None:
        """Cancel what has not come yet. Idempotent."""
        if self._state.num_open > 0:
            self._state.num_open = 0
            self._client._abandon(self._call)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at interpreter exit little is left to work with
            self.close()
