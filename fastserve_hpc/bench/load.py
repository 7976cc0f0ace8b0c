"""Sends requests when they are due and measures the answers (open loop), or one after the other (single stream).

Every time counts from the moment at which a request was due, so waiting inside this client counts
too, and a slow server cannot slow the load down. In a single stream a request is due when the one before has ended.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastserve_hpc.bench.trace import Load
from fastserve_hpc.client import AsyncClient
from fastserve_hpc.core.engine import EngineStatus
from fastserve_hpc.errors import EndpointError, RequestError
from fastserve_hpc.stats import summarise


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request went. Times are seconds from when it was due."""

    output_tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """Requests to send, and a prompt for each. `warm_up` are sent before, all at once, and are not measured."""

    loads: Sequence[Load]
    prompts: Sequence[list[int]]
    one_by_one: bool = False
    warm_up: Sequence[tuple[Load, list[int]]] = ()


Plan = Callable[[EngineStatus], Run]
"""What suits a server."""
OnFinish = Callable[[Outcome, int], None]
"""Called with each outcome as it comes, and the number of all requests."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """How a load went."""

    outcomes: Sequence[Outcome]
    """In the order of the requests."""
    wall_s: float
    """From the first due time to the last token."""
    counted: dict[str, float]
    """What the server has counted meanwhile, for all its clients (`EngineStatus.counted_since`)."""


def load_server(endpoint: str | None, job: str | None, plan: Plan, on_finish: OnFinish) -> Loaded:
    """Load the server that an endpoint name or a Slurm job stands for."""
    return asyncio.run(_load_server(endpoint, job, plan, on_finish))


async def _load_server(endpoint: str | None, job: str | None, plan: Plan, on_finish: OnFinish) -> Loaded:
    async with AsyncClient(endpoint, job=job) as client:
        run = plan(await client.status())
        if run.warm_up:
            loads, prompts = zip(*run.warm_up, strict=True)
            await run_load(client, Run(loads, prompts), lambda *_: None)
        before = await client.status()
        outcomes, wall_s = await run_load(client, run, on_finish)
        try:
            counted = (await client.status()).counted_since(before)
        except EndpointError:  # it was told to stop: it finishes what it has, and answers no more
            counted = {}
        return Loaded(outcomes, wall_s, counted)


async def run_load(client: Any, run: Run, on_finish: OnFinish) -> tuple[list[Outcome], float]:
    """Send all requests; the outcomes in their order, and wall seconds from the first due time to the last token."""

    def finish(outcome: Outcome) -> None:
        on_finish(outcome, len(run.loads))

    start = time.monotonic()
    if run.one_by_one:
        outcomes = [
            await _send(client, load, prompt, time.monotonic(), finish)
            for load, prompt in zip(run.loads, run.prompts, strict=True)
        ]
        return outcomes, time.monotonic() - start
    tasks = []
    for load, prompt in zip(run.loads, run.prompts, strict=True):
        if (wait_s := start + load.due_s - time.monotonic()) > 0:
            await asyncio.sleep(wait_s)
        tasks.append(asyncio.create_task(_send(client, load, prompt, start + load.due_s, finish)))
    try:
        outcomes = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return outcomes, time.monotonic() - start - run.loads[0].due_s


async def _send(client: Any, load: Load, prompt: list[int], due: float, finish: Callable[[Outcome], None]) -> Outcome:
    tokens, first_s, last_s = 0, 0.0, 0.0
    try:
        async for event in client.stream(prompt, max_tokens=load.output_tokens, ignore_eos=True):
            if event.token_ids:
                last_s = time.monotonic() - due
                first_s = first_s or last_s
                tokens += len(event.token_ids)
        outcome = Outcome(tokens, first_s, last_s, None if tokens else "no output")
    except RequestError as error:
        outcome = Outcome(error=str(error))
    finish(outcome)
    return outcome


def report(outcomes: Sequence[Outcome], wall_s: float) -> dict[str, Any]:
    """What `bench --json` prints; latencies of the requests that were answered.

    `decode_tokens_per_s` is the median over requests of the rate behind the first token: what one reader sees.
    """
    good = [outcome for outcome in outcomes if outcome.error is None]
    tpots = [(o.last_s - o.first_s) / (o.output_tokens - 1) for o in good if o.output_tokens > 1]
    rates = [1 / tpot for tpot in tpots if tpot > 0]
    return {
        "requests": len(outcomes),
        "failed": len(outcomes) - len(good),
        "wall_s": wall_s,
        "output_tokens_per_s": sum(outcome.output_tokens for outcome in good) / max(wall_s, 1e-9),
        "decode_tokens_per_s": statistics.median(rates) if rates else None,
        "ttft_s": summarise([outcome.first_s for outcome in good]),
        "tpot_s": summarise(tpots),
        "latency_s": summarise([outcome.last_s for outcome in good]),
        "normalized_latency_s": summarise([outcome.last_s / outcome.output_tokens for outcome in good]),
    }
