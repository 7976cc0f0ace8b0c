"""Runs a batch file on a server: a bounded number of requests in flight, results as they finish."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterable
from typing import Any, Protocol

from fastserve_hpc.batch.reader import BatchItem, LineError
from fastserve_hpc.batch.summary import Counts
from fastserve_hpc.batch.writer import ResultWriter
from fastserve_hpc.client.results import Collector, Generation
from fastserve_hpc.core.request import SamplingParams
from fastserve_hpc.errors import BusyError, EndpointError, RequestError

BUSY_WAIT_S = (0.05, 2.0)
"""First and longest pause before a request that a busy server refused is sent again."""


class Progress(Protocol):
    """Shows how far a run has come."""

    def update(self, counts: Counts) -> None: ...


class BatchRunner:
    """One run of one file. `client` is an open `AsyncClient`; `counts` may be read at any time."""

    def __init__(self, client: Any, model: str, writer: ResultWriter, progress: Progress, in_flight: int):
        self.counts = Counts()
        self._client = client
        self._model = model
        self._writer = writer
        self._progress = progress
        self._in_flight = in_flight

    async def run(self, items: Iterable[BatchItem | LineError]) -> Counts:
        """Run every item that the output does not hold yet. Raises `EndpointError` when the server goes away."""
        running: set[asyncio.Task[None]] = set()
        try:
            for item in items:
                if self._writer.has(item):
                    self.counts.skipped += 1
                elif isinstance(item, LineError):
                    self._failed(item)
                else:
                    running.add(asyncio.create_task(self._run_item(item)))
                    running = await self._below(running, self._in_flight)
            await self._below(running, 1)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return self.counts

    async def _below(self, running: set[asyncio.Task[None]], limit: int) -> set[asyncio.Task[None]]:
        """Wait until fewer than `limit` are running; raises what a task raised."""
        while len(running) >= limit:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        return running

    async def _run_item(self, item: BatchItem) -> None:
        start = time.monotonic()
        try:
            generation, ttft_s = await self._generation(item)
        except RequestError as error:
            if error.code == "draining":
                raise EndpointError("the server is ending and takes no more requests") from error
            self._failed(LineError(item.line, item.custom_id, error.code, f"line {item.line}: {error}"))
            return
        self._writer.write_result(item, generation, self._model, created=int(time.time()))
        self.counts.answered(generation.usage, ttft_s, time.monotonic() - start)
        self._progress.update(self.counts)

    async def _generation(self, item: BatchItem) -> tuple[Generation, float | None]:
        pause = BUSY_WAIT_S[0]
        while True:
            try:
                return await self._stream(item)
            except BusyError:
                await asyncio.sleep(pause)
                pause = min(2 * pause, BUSY_WAIT_S[1])

    async def _stream(self, item: BatchItem) -> tuple[Generation, float | None]:
        ask = item.ask
        start, ttft_s, collector = time.monotonic(), None, Collector(ask.sampling.n)
        events = self._client.stream(
            ask.prompt, model=ask.model, service_class="batch", **sampling_fields(ask.sampling)
        )
        async for event in events:
            collector.add(event)
            if ttft_s is None and event.token_ids:
                ttft_s = time.monotonic() - start
        generation = collector.generation()
        _check_finished(generation)
        return generation, ttft_s

    def _failed(self, error: LineError) -> None:
        self._writer.write_error(error)
        self.counts.failed += 1
        self._progress.update(self.counts)


def _check_finished(generation: Generation) -> None:
    for choice in generation.choices:
        if choice.finish_reason not in ("stop", "length"):
            reason = choice.finish_reason or "no reason given"
            raise RequestError(f"choice {choice.index} was not finished ({reason})", code="internal")


def sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """The parameters as the keywords that a client takes; defaults are left out."""
    default = SamplingParams()
    fields = ((field.name, getattr(sampling, field.name)) for field in dataclasses.fields(sampling))
    return {name: value for name, value in fields if value != getattr(default, name)}
