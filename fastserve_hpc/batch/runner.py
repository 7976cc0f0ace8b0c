"""Runs items on a server: a bounded number of requests in flight, results as they finish."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from typing import Protocol

from fastserve_hpc.batch.output import Output
from fastserve_hpc.batch.reader import BatchItem, LineError
from fastserve_hpc.batch.server import BatchServer
from fastserve_hpc.batch.summary import Counts
from fastserve_hpc.errors import RequestError


class Progress(Protocol):
    """Shows how far a run has come; called after every line."""

    def update(self, counts: Counts) -> None: ...


class BatchRunner:
    """One run. `counts` may be read at any time, and so may `num_put_off`: lines that are left for another run."""

    def __init__(self, server: BatchServer, output: Output, progress: Progress, in_flight: int) -> None:
        self.counts = Counts(skipped=len(output.done.lines), failed_before=output.done.num_failed)
        self.num_put_off = 0
        self._server = server
        self._output = output
        self._progress = progress
        self._in_flight = in_flight

    async def run(self, items: Iterable[BatchItem | LineError]) -> None:
        """Run every item. Raises `EndpointError` when the server is lost, `FastServeError` when nothing can be
        written; what is in flight then, or when this is cancelled, is left for another run.
        """
        todo = iter(items)
        workers = [asyncio.create_task(self._work(todo)) for _ in range(self._in_flight)]
        try:
            ended, _ = await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
            for worker in ended:
                worker.result()
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, todo: Iterator[BatchItem | LineError]) -> None:
        """Take lines from the common pile until it is empty."""
        for item in todo:
            if isinstance(item, LineError):
                self._failed(item)
                await asyncio.sleep(0)  # a file of wrong lines must not keep others from their answers
            else:
                await self._run_item(item)

    async def _run_item(self, item: BatchItem) -> None:
        self.counts.in_flight += 1
        try:
            answer = await self._server.answer(item)
        except RequestError as error:
            if error.code == "job_ending":
                self.num_put_off += 1  # not the line's fault: the next run has more time
                return
            self._failed(item.error(error.code, str(error)))
            return
        finally:
            self.counts.in_flight -= 1
        self._output.write_result(item, answer.generation, self._server.model, created=int(time.time()))
        self.counts.answered(answer.generation.usage, item.ask.wants_output, answer.ttft_s, answer.latency_s)
        self._progress.update(self.counts)

    def _failed(self, error: LineError) -> None:
        self._output.write_error(error)
        self.counts.failed += 1
        self._progress.update(self.counts)
