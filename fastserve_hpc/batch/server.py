"""The server as a batch run sees it: it may be busy, end, or die and come back; none of that is a line's fault."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastserve_hpc.batch.reader import BatchItem
from fastserve_hpc.client.results import Collector, Generation
from fastserve_hpc.core.engine import EngineStatus
from fastserve_hpc.core.request import SamplingParams
from fastserve_hpc.errors import BusyError, ConfigError, EndpointError, RequestError
from fastserve_hpc.openai.bodies import Ask

BUSY_WAIT_S = (0.05, 2.0)
"""First and longest pause before a request that a busy server refused is sent again."""
LOST_WAIT_S = (0.1, 5.0)
"""The same for asking whether a lost server is back."""
MAX_LOSSES = 5
"""So often may the server be lost without a single answer in between."""
_DEFAULTS = tuple((field.name, getattr(SamplingParams(), field.name)) for field in dataclasses.fields(SamplingParams))


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished generation and how long it took, waiting in the server included."""

    generation: Generation
    latency_s: float
    ttft_s: float | None
    """None where it was not asked for."""


class BatchServer:
    """Answers items. `client` is an open `AsyncClient`."""

    def __init__(
        self,
        client: Any,
        model: str,
        *,
        wants_ttft: bool = False,
        slowdown: float | None = None,
        reconnect_s: float = 0.0,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`slowdown`: what each request may cost interactive ones. `reconnect_s`: how long a server that is lost or
        ending may take to be there again.
        """
        self.model = model
        self._slowdown = slowdown
        self._client = client
        self._generate = self._stream if wants_ttft else self._whole
        self._reconnect_s = reconnect_s
        self._say = say
        self._epoch = 0
        self._num_losses = 0
        self._recovering = asyncio.Lock()
        self._last_sampling = SamplingParams()
        self._last_fields: dict[str, Any] = {}

    async def answer(self, item: BatchItem) -> Answer:
        """Raises `RequestError` where the line is wrong, `EndpointError` where the server is lost for good."""
        start, pause = time.monotonic(), BUSY_WAIT_S[0]
        while True:
            epoch = self._epoch
            try:
                generation, ttft_s = await self._finished(item)
            except BusyError:
                await asyncio.sleep(pause)
                pause = min(2 * pause, BUSY_WAIT_S[1])
            except EndpointError as error:
                await self._recover(epoch, error)
                start = time.monotonic()
            else:
                self._num_losses = 0
                return Answer(generation, time.monotonic() - start, ttft_s)

    async def _finished(self, item: BatchItem) -> tuple[Generation, float | None]:
        try:
            generation, ttft_s = await self._generate(item)
        except RequestError as error:
            if error.code == "draining":
                raise EndpointError("the server is ending and takes no more requests") from error
            raise
        _check_finished(generation)
        return generation, ttft_s

    async def used_since(self, then: EngineStatus) -> dict[str, float]:
        """What the server has counted since, for all its clients; nothing where it does not answer or was another."""
        try:
            now: EngineStatus = await self._client.status()
        except EndpointError:
            return {}
        return now.counted_since(then)

    async def steer(self, slowdown: float) -> None:
        """What is with the server, and what follows, may cost interactive requests so much from now on."""
        if slowdown != self._slowdown:
            self._slowdown = slowdown
            with contextlib.suppress(EndpointError):  # who waits for an answer will notice
                await self._client.steer(slowdown)

    def _fields(self, ask: Ask) -> dict[str, Any]:
        """All that the client is told beside the prompt. Lines often share their sampling parameters."""
        if ask.sampling is not self._last_sampling:
            self._last_sampling, self._last_fields = ask.sampling, sampling_fields(ask.sampling)
        fields = {"model": ask.model, "service_class": "batch", **self._last_fields, **ask.hints}
        if ask.continuation is not None:
            fields["continuation"] = ask.continuation
        if self._slowdown is not None:
            fields["slowdown"] = self._slowdown
        return fields

    async def _whole(self, item: BatchItem) -> tuple[Generation, float | None]:
        return await self._client.generate(item.ask.prompt, **self._fields(item.ask)), None

    async def _stream(self, item: BatchItem) -> tuple[Generation, float | None]:
        ask = item.ask
        start, ttft_s, collector = time.monotonic(), None, Collector(ask.sampling.n)
        async for event in self._client.stream(ask.prompt, **self._fields(ask)):
            collector.add(event)
            if ttft_s is None and event.token_ids:
                ttft_s = time.monotonic() - start
        return collector.generation(), ttft_s

    async def _recover(self, epoch: int, error: EndpointError) -> None:
        """Wait until the server is there again. Raises `error` where that takes too long."""
        async with self._recovering:
            if epoch != self._epoch:
                return  # another line has waited for it
            self._num_losses += 1
            if self._reconnect_s <= 0 or self._num_losses > MAX_LOSSES:
                raise error
            self._say(f"{error}; waiting up to {self._reconnect_s:g} s for it to come back")
            deadline, pause = time.monotonic() + self._reconnect_s, LOST_WAIT_S[0]
            while not await self._is_ready():
                if time.monotonic() >= deadline:
                    raise error
                await asyncio.sleep(pause)
                pause = min(2 * pause, LOST_WAIT_S[1])
            self._epoch += 1

    async def _is_ready(self) -> bool:
        try:
            status = await self._client.status()
        except EndpointError:
            return False
        if status.state == "ready" and status.model != self.model:
            raise ConfigError(f"the server that came back serves {status.model}, but this run is of {self.model}")
        return bool(status.state == "ready")


def _check_finished(generation: Generation) -> None:
    """What a server that ends gives back is no result."""
    for choice in generation.choices:
        if choice.finish_reason == "cancelled":
            raise EndpointError("the server is ending and has cancelled what ran")
        if choice.finish_reason not in ("stop", "length"):
            reason = choice.finish_reason or "no reason given"
            raise RequestError(f"choice {choice.index} was not finished ({reason})", code="internal")


def sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """The parameters as the keywords that a client takes; defaults are left out."""
    return {name: value for name, default in _DEFAULTS if (value := getattr(sampling, name)) != default}
