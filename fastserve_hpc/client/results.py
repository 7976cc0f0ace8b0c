"""What a generation gives back: events while it streams, and the whole of it at the end."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from fastserve_hpc.core.plan import TokenLogprobs
from fastserve_hpc.core.request import FinishReason
from fastserve_hpc.protocol import Delta, Usage


@dataclass(frozen=True, slots=True)
class Event:
    """New output of one choice. With `finish_reason` it is that choice's last."""

    choice: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs | None]
    usage: Usage | None

    @classmethod
    def of(cls, delta: Delta) -> Event:
        return cls(
            delta.choice,
            delta.text,
            delta.token_ids,
            delta.finish_reason,
            delta.logprobs,
            delta.prompt_logprobs,
            delta.usage,
        )


@dataclass(slots=True)
class Choice:
    """One answer."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One entry a token if logprobs were asked for, else empty."""
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class Generation:
    """All answers to one prompt; the first one's fields are there directly."""

    choices: list[Choice]
    prompt_logprobs: list[TokenLogprobs | None]
    """One entry a prompt token, None for the first, if they were asked for; else empty."""
    usage: Usage
    """`completion_tokens` counts all choices."""

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        return self.choices[0].logprobs

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.choices[0].finish_reason


@dataclass(frozen=True, slots=True)
class Score:
    """What a model says of a continuation, as lm-evaluation-harness defines it."""

    loglikelihood: float
    """Sum over the continuation's tokens, from the raw logits."""
    is_greedy: bool
    """Whether greedy decoding would have said the same."""
    num_tokens: int
    """Of the continuation."""
    num_cut: int = 0
    """Tokens of the context that did not fit, off its beginning."""

    @classmethod
    def of(cls, generation: Generation) -> Score:
        """From the answer to a `Submit` with a continuation."""
        entries = [entry for entry in generation.prompt_logprobs if entry is not None]
        loglikelihood = math.fsum(entry.logprob for entry in entries)
        is_greedy = all(entry.top[0][0] == entry.token_id for entry in entries)
        return cls(loglikelihood, is_greedy, len(entries), generation.usage.cut_tokens)


class Collector:
    """Adds the events of `n` choices up."""

    def __init__(self, n: int) -> None:
        self._num_choices = n
        self._choices: dict[int, Choice] = {}  # made as they come: the server refuses an `n` that is out of reason
        self._prompt_logprobs: list[TokenLogprobs | None] = []
        self._usages: dict[int, Usage] = {}

    def add(self, event: Event) -> None:
        choice = self._choices.setdefault(event.choice, Choice(event.choice))
        choice.text += event.text
        choice.token_ids += event.token_ids
        choice.logprobs += event.logprobs
        choice.finish_reason = event.finish_reason or choice.finish_reason
        self._prompt_logprobs += event.prompt_logprobs
        if event.usage is not None:
            self._usages[event.choice] = event.usage

    def add_all(self, events: Iterable[Event]) -> Generation:
        for event in events:
            self.add(event)
        return self.generation()

    def generation(self) -> Generation:
        prompt_tokens = max((u.prompt_tokens for u in self._usages.values()), default=0)
        completion_tokens = sum(u.completion_tokens for u in self._usages.values())
        choices = [self._choices.get(i, Choice(i)) for i in range(self._num_choices)]
        cut_tokens = max((u.cut_tokens for u in self._usages.values()), default=0)
        return Generation(choices, self._prompt_logprobs, Usage(prompt_tokens, completion_tokens, cut_tokens))
