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
from fastserve_hpc.errors import RequestError
from fastserve_hpc.stats import summarise


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request went. Times are seconds from when it was due."""

    output_tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    error: str | None = None


async def run_load(
    client: Any, loads: Sequence[Load], prompts: Sequence[list[int]], on_finish: Callable[[Outcome], None]
) -> tuple[list[Outcome], float]:
    """Send all requests; the outcomes in trace order, and wall seconds from the first due time to the last token."""
    start = time.monotonic()
    tasks = []
    for load, prompt in zip(loads, prompts, strict=True):
        await asyncio.sleep(max(0.0, start + load.due_s - time.monotonic()))
        tasks.append(asyncio.create_task(_send(client, load, prompt, start + load.due_s, on_finish)))
    try:
        outcomes = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return outcomes, time.monotonic() - start - loads[0].due_s


async def _send(
    client: Any, load: Load, prompt: list[int], due: float, on_finish: Callable[[Outcome], None]
) -> Outcome:
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
    on_finish(outcome)
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
