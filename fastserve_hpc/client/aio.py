"""The client for asyncio programs: any number of requests at once over one connection."""

from __future__ import annotations

import asyncio
import contextlib
import time
from types import TracebackType
from typing import Any

from fastserve_hpc.client.base import ClientBase, StreamState, answer_as
from fastserve_hpc.client.calls import Call, Prompt, encoded, make_submit
from fastserve_hpc.client.connection import Connection
from fastserve_hpc.client.results import Collector, Event, Generation, Score
from fastserve_hpc.core.engine import EngineStatus
from fastserve_hpc.core.request import ServiceClass
from fastserve_hpc.errors import EndpointError
from fastserve_hpc.protocol import NO_ID, Drain, Draining, StatusQuery, StatusReply, Steer, ToClient, ToServer

_SEND_RETRY_S = 0.01
_SILENCE_CHECK_S = 1.0


class AsyncClient(ClientBase):
    """A connection to a running server, for the tasks of one event loop. It connects with the first call.

    A lost connection ends the calls that are open with `EndpointError`; the next call connects anew.
    """

    _loop: asyncio.AbstractEventLoop | None = None
    _silence_timer: asyncio.TimerHandle | None = None
    _connecting: asyncio.Task[None] | None = None

    async def generate(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        service_class: ServiceClass = "interactive",
        session: str | None = None,
        expected_tokens: int | None = None,
        **sampling: Any,
    ) -> Generation:
        """The whole answer; `sampling` are the fields of `SamplingParams`. Cancelling the task cancels it.

        Raises `RequestError` if it is refused, `BusyError` if it may be sent again later, `EndpointError`
        if the server is lost.
        """
        options = {"model": model, "service_class": service_class, "session": session}
        async with AsyncStream(
            self, prompt, {**options, **sampling, "stream": False, "expected_tokens": expected_tokens}
        ) as stream:
            collector = Collector(stream.num_choices)
            async for event in stream:
                collector.add(event)
            return collector.generation()

    def stream(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        service_class: ServiceClass = "interactive",
        session: str | None = None,
        expected_tokens: int | None = None,
        **sampling: Any,
    ) -> AsyncStream:
        """The answer as it comes. The request is sent when iteration begins; closing the stream cancels it."""
        options = {"model": model, "service_class": service_class, "session": session}
        return AsyncStream(self, prompt, {**options, **sampling, "stream": True, "expected_tokens": expected_tokens})

    async def score(
        self,
        context: str | list[int],
        continuation: str | list[int],
        *,
        model: str | None = None,
        service_class: ServiceClass = "interactive",
        slowdown: float | None = None,
    ) -> Score:
        """How likely the model finds a continuation, as lm-evaluation-harness defines it: both are tokenised together,
        white space at the context's end counts with the continuation, an empty context is the token that begins texts.

        Raises as `generate`.
        """
        options: dict[str, Any] = {"model": model, "service_class": service_class, "slowdown": slowdown}
        return Score.of(await self.generate(context, continuation=continuation, **options))

    async def steer(self, slowdown: float) -> None:
        """Let what this client has open of class `batch` make interactive requests take so many times as long."""
        call = await self._open(Steer(NO_ID, slowdown))
        self._calls.close(call)

    async def status(self) -> EngineStatus:
        """What the server is doing."""
        return answer_as(await self._ask(StatusQuery(NO_ID)), StatusReply).status

    async def drain(self, now: bool = False) -> None:
        """Ask the server to end: after what it has taken or, with `now`, without finishing it."""
        answer_as(await self._ask(Drain(NO_ID, now)), Draining)

    async def close(self) -> None:
        """Cancel what runs and disconnect. Idempotent; a later call connects anew."""
        connection = self._connection
        if connection is not None:
            self._cancel_all()
            self._connection = None
            self._release(connection)
            connection.close()
        self._calls.fail_all(EndpointError("the client was closed"))

    async def __aenter__(self) -> AsyncClient:
        await self._connected()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _ask(self, question: ToServer) -> ToClient:
        call = await self._open(question)
        try:
            return await self._next(call)
        finally:
            self._calls.close(call)

    async def _open(self, message: ToServer) -> Call:
        """Send a message; the call that takes the answers. Raises `RequestError` or `EndpointError`."""
        connection = await self._connected()
        if not self._calls.open_ids:
            self._last_word = time.monotonic()  # nobody has waited for one
        call = self._calls.open()
        try:
            frames = encoded(message, call.id)
            while not connection.send(frames):
                await asyncio.sleep(_SEND_RETRY_S)
                call.check()
        except BaseException:
            self._cancel(call)
            raise
        self._take_in()  # sending may have swallowed the descriptor's signal that something came
        return call

    async def _next(self, call: Call) -> ToClient:
        """The next answer to a call. Raises what the server answered, or `EndpointError`."""
        while (answer := call.take()) is None:
            waiter = asyncio.get_running_loop().create_future()
            call.on_answer = lambda waiter=waiter: waiter.done() or waiter.set_result(None)  # type: ignore[misc]
            await waiter
        return answer

    async def _connected(self) -> Connection:
        """The connection, made anew if it was lost since the last call."""
        if self._connection is not None and self._loop is not asyncio.get_running_loop():
            self._lose("the event loop that this client was used in has ended")
        self._take_in()
        while self._connection is None:
            if self._connecting is None:
                self._connecting = asyncio.ensure_future(self._connect())
            # A caller that is cancelled leaves the others their connection.
            await asyncio.shield(self._connecting)
        return self._connection

    async def _connect(self) -> None:
        try:
            self._adopt(await asyncio.get_running_loop().run_in_executor(None, self._open_connection))
        finally:
            self._connecting = None

    def _adopt(self, connection: Connection) -> None:
        super()._adopt(connection)
        self._loop = asyncio.get_running_loop()
        for socket in (connection.socket, connection.monitor):
            self._loop.add_reader(socket.fileno(), self._take_in)
        self._silence_timer = self._loop.call_later(_SILENCE_CHECK_S, self._watch_silence)
        self._take_in()  # the descriptors signal changes, not what came before

    def _release(self, connection: Connection) -> None:
        if self._silence_timer is not None:
            self._silence_timer.cancel()
        if self._loop is not None and not self._loop.is_closed():
            for socket in (connection.socket, connection.monitor):
                self._loop.remove_reader(socket.fileno())

    def _watch_silence(self) -> None:
        self._take_in()
        if self._calls.open_ids:
            self._check_silence(self._last_word)
        if self._loop is not None and self._connection is not None:
            self._silence_timer = self._loop.call_later(_SILENCE_CHECK_S, self._watch_silence)

    def _abandon(self, call: Call) -> None:
        """Cancel a call, from any thread: the garbage collector may run in another one."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._cancel, call)


class AsyncStream:
    """Iterates over the events of one request."""

    def __init__(self, client: AsyncClient, prompt: Prompt, options: dict[str, Any]) -> None:
        self._client = client
        self._submit = make_submit(prompt, **options)
        self._state = StreamState(self._submit)
        self._call: Call | None = None

    @property
    def num_choices(self) -> int:
        return self._state.num_choices

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Event:
        """Raises what the server answered, or `EndpointError`. A cancelled wait may be taken up again."""
        if self._state.num_open == 0:
            raise StopAsyncIteration
        try:
            if self._call is None:
                self._call = await self._client._open(self._submit)
            event = self._state.take(await self._client._next(self._call))
        except Exception:
            await self.aclose()
            raise
        if self._state.num_open == 0:
            self._client._calls.close(self._call)
        return event

    async def aclose(self) -> None:
        """Cancel what has not come yet. Idempotent."""
        self._state.num_open = 0
        if self._call is not None:
            self._client._cancel(self._call)

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at interpreter exit little is left to work with
            if self._call is not None and self._state.num_open > 0:
                self._client._abandon(self._call)
