"""In the place of `Client` and `AsyncClient`: answers at once, repeats the prompt, remembers what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from fastserve_hpc.client.results import Collector, Event, Generation
from fastserve_hpc.core.engine import BlockUsage, EngineStatus
from fastserve_hpc.errors import EndpointError
from fastserve_hpc.protocol import Usage

STATUS = EngineStatus(
    state="ready",
    model="fake",
    max_model_len=100,
    world_size=2,
    tp=1,
    pp=2,
    policy="fcfs",
    running=1,
    waiting=2,
    device_blocks=BlockUsage(10, 4),
    host_blocks=BlockUsage(0, 0),
    preemptions=3,
    uptime_s=61.5,
    vocab_size=32000,
)


@dataclass
class FakeServer:
    """What all fake clients of a test share."""

    requests: list[dict[str, Any]] = field(default_factory=list)
    opened: list[tuple[Any, Any]] = field(default_factory=list)
    """(endpoint, job) of every client."""
    errors: dict[str, list[BaseException]] = field(default_factory=dict)
    """What prompts with this text in them meet, one after the other, before they are answered."""
    drained: list[bool] = field(default_factory=list)
    steered: list[float] = field(default_factory=list)
    status: EngineStatus = STATUS
    in_flight: int = 0
    most_in_flight: int = 0
    delay_s: float = 0.0

    def answer(self, prompt: Any, options: dict[str, Any]) -> list[Event]:
        """A word an event, as many as max_tokens allows."""
        self.requests.append({"prompt": prompt, **options})
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"] if _is_chat(prompt) else "ids"
        for part, errors in self.errors.items():
            if part in text and errors:
                raise errors.pop(0)
        words = ["echo", *text.split()] if not options.get("ignore_eos") else ["w"] * options["max_tokens"]
        words = words[: options.get("max_tokens", len(words))]
        return [e for choice in range(options.get("n", 1)) for e in _events(choice, words, len(text.split()))]

    def drain(self, now: bool) -> None:
        self.drained.append(now)
        self.status = replace(self.status, state="draining")

    def current_status(self) -> EngineStatus:
        if self.status.state == "draining":
            raise EndpointError("gone")
        return self.status


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt[0], dict)


def _events(choice: int, words: list[str], prompt_tokens: int) -> Iterator[Event]:
    for i, word in enumerate(words):
        last = i == len(words) - 1
        usage = Usage(prompt_tokens, len(words)) if last else None
        yield Event(choice, word + " " * (not last), [100 + i], "stop" if last else None, [], [], usage)


class FakeStream:
    """Of both kinds; keeps count of how many are open."""

    def __init__(self, server: FakeServer, prompt: Any, options: dict[str, Any]):
        self._server = server
        self._events = iter(server.answer(prompt, options))
        self.closed = False

    def __iter__(self) -> FakeStream:
        return self

    def __next__(self) -> Event:
        return next(self._events)

    def close(self) -> None:
        self.closed = True

    async def __aiter__(self) -> AsyncIterator[Event]:
        server = self._server
        server.in_flight += 1
        server.most_in_flight = max(server.most_in_flight, server.in_flight)
        try:
            for event in self._events:
                await asyncio.sleep(server.delay_s)
                yield event
        finally:
            server.in_flight -= 1


class FakeClient:
    server = FakeServer()

    def __init__(self, endpoint: Any = None, *, job: Any = None):
        self.server.opened.append((endpoint, job))

    def stream(self, prompt: Any, **options: Any) -> FakeStream:
        return FakeStream(self.server, prompt, options)

    def status(self) -> EngineStatus:
        return self.server.current_status()

    def drain(self, now: bool = False) -> None:
        self.server.drain(now)

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class FakeAsyncClient:
    server = FakeServer()

    def __init__(self, endpoint: Any = None, *, job: Any = None):
        self.server.opened.append((endpoint, job))

    def stream(self, prompt: Any, **options: Any) -> FakeStream:
        return FakeStream(self.server, prompt, options)

    async def generate(self, prompt: Any, **options: Any) -> Generation:
        collector = Collector(options.get("n", 1))
        async for event in self.stream(prompt, **options):
            collector.add(event)
        return collector.generation()

    async def status(self) -> EngineStatus:
        return self.server.current_status()

    async def steer(self, slowdown: float) -> None:
        self.server.steered.append(slowdown)

    async def __aenter__(self) -> FakeAsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass
