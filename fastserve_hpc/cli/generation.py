"""Follows one streamed generation: its text as it comes, and when it came."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Choice:
    """One answer, as far as it has come."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(slots=True)
class Generation:
    """All answers to one prompt. Times are seconds from the moment it was sent."""

    choices: dict[int, Choice] = field(default_factory=dict)
    ttft_s: float | None = None
    latency_s: float = 0.0

    @property
    def output_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices.values())

    def record(self) -> dict[str, Any]:
        """What `submit --json` prints; the first choice is spelled out on the top level."""
        choices = [
            {"index": index, "text": c.text, "token_ids": c.token_ids, "finish_reason": c.finish_reason}
            for index, c in sorted(self.choices.items())
        ]
        first = {name: value for name, value in choices[0].items() if name != "index"} if choices else {}
        return {**first, "choices": choices, **self.timing()}

    def timing(self) -> dict[str, Any]:
        """Counts and seconds, the line that `submit --stats` appends."""
        return {
            "output_tokens": self.output_tokens,
            "ttft_s": self.ttft_s,
            "latency_s": self.latency_s,
        }


def follow(
    events: Iterable[Any], on_text: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> Generation:
    """Take in a stream's events; `on_text` gets each piece of the first choice as it comes."""
    start, generation = clock(), Generation()
    for event in events:
        choice = generation.choices.setdefault(event.choice, Choice())
        choice.text += event.text
        choice.token_ids += event.token_ids
        choice.finish_reason = event.finish_reason or choice.finish_reason
        generation.latency_s = clock() - start
        if generation.ttft_s is None and event.token_ids:
            generation.ttft_s = generation.latency_s
        if event.text and event.choice == 0:
            on_text(event.text)
    return generation
