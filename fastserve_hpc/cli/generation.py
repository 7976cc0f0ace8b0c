"""Follows one streamed generation: its text as it comes, and when it came."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastserve_hpc.client import Event, Generation


@dataclass(frozen=True, slots=True)
class Timed:
    """A generation and its times, in seconds from the moment at which its prompt was sent."""

    generation: Generation
    ttft_s: float | None
    latency_s: float

    @property
    def was_cut_off(self) -> bool:
        """The server ended before an answer did."""
        return any(choice.finish_reason == "cancelled" for choice in self.generation.choices)

    def record(self) -> dict[str, Any]:
        """What `submit --json` prints; the first choice is spelled out on the top level."""
        choices = [
            {"index": c.index, "text": c.text, "token_ids": c.token_ids, "finish_reason": c.finish_reason}
            for c in self.generation.choices
        ]
        first = {name: value for name, value in choices[0].items() if name != "index"}
        return {**first, "choices": choices, **self.timing()}

    def timing(self) -> dict[str, Any]:
        """Token counts and seconds; the line that `submit --stats` appends."""
        return {
            "prompt_tokens": self.generation.usage.prompt_tokens,
            "output_tokens": self.generation.usage.completion_tokens,
            "ttft_s": self.ttft_s,
            "latency_s": self.latency_s,
        }


def follow(
    events: Iterable[Event], n: int, on_text: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> Timed:
    """Take in the events of a stream of `n` choices; `on_text` gets each piece of the first as it comes."""
    from fastserve_hpc.client.results import Collector

    start, ttft_s, collector = clock(), None, Collector(n)
    for event in events:
        collector.add(event)
        if ttft_s is None and event.token_ids:
            ttft_s = clock() - start
        if event.text and event.choice == 0:
            on_text(event.text)
    return Timed(collector.generation(), ttft_s, clock() - start)
