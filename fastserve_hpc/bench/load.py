"""Sends a trace's requests when they are due and measures the answers (open loop).

Every time counts from the moment at which a request was due, so waiting inside this client counts
too, and a slow server cannot slow the load down.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastserve_hpc.bench.trace import Load
from fastserve_hpc.client import AsyncClient
from fastserve_hpc.core.engine import EngineStatus
from fastserve_hpc.errors import RequestError
from fastserve_hpc.stats import summarise


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request went. Times are seconds from when it was due."""

    output_tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    error: str | None = None


Plan = Callable[[EngineStatus], tuple[Sequence[Load], Sequence[list[int]]]]
"""Requests, and a prompt for each, that suit a server."""
OnFinish = Callable[[Outcome, int], None]
"""Called with each outcome as it comes, and the number of all requests."""


def load_server(
    endpoint: str | None, job: str | None, plan: Plan, on_finish: OnFinish
) -> tuple[Sequence[Outcome], float]:
    """Load the server that an endpoint name or a Slurm job stands for; see `run_load`."""
    return asyncio.run(_load_server(endpoint, job, plan, on_finish))


async def _load_server(
    endpoint: str | None, job: str | None, plan: Plan, on_finish: OnFinish
) -> tuple[Sequence[Outcome], float]:
    async with AsyncClient(endpoint, job=job) as client:
        loads, prompts = plan(await client.status())
        return await run_load(client, loads, prompts, on_finish)


async def run_load(
    client: Any, loads: Sequence[Load], prompts: Sequence[list[int]], on_finish: OnFinish
) -> tuple[list[Outcome], float]:
    """Send all requests; the outcomes in trace order, and wall seconds from the first due time to the last token."""

    def finish(outcome: Outcome) -> None:
        on_finish(outcome, len(loads))

    start = time.monotonic()
    tasks = []
    for load, prompt in zip(loads, prompts, strict=True):
        await asyncio.sleep(max(0.0, start + load.due_s - time.monotonic()))
        tasks.append(asyncio.create_task(_send(client, load, prompt, start + load.due_s, finish)))
    try:
        outcomes = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return outcomes, time.monotonic() - start - loads[0].due_s


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
    """What `bench --json` prints; latencies of the requests that were answered."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    return {
        "requests": len(outcomes),
        "failed": len(outcomes) - len(good),
        "wall_s": wall_s,
        "output_tokens_per_s": sum(outcome.output_tokens for outcome in good) / max(wall_s, 1e-9),
        "ttft_s": summarise([outcome.first_s for outcome in good]),
        "tpot_s": summarise([(o.last_s - o.first_s) / (o.output_tokens - 1) for o in good if o.output_tokens > 1]),
        "normalized_latency_s": summarise([outcome.last_s / outcome.output_tokens for outcome in good]),
    }
