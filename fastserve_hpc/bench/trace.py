"""Request traces: JSON lines of arrival_s, prompt_tokens, output_tokens; lengths and times, no text."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from fastserve_hpc.errors import ConfigError

FIRST_ORDINARY_ID = 300
"""Below are the special tokens and single bytes of the usual vocabularies."""


class TraceLine(msgspec.Struct, frozen=True):
    arrival_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """One request to send: when (seconds from the start) and how long."""

    due_s: float
    prompt_tokens: int
    output_tokens: int


def read_trace(path: Path, limit: int | None = None) -> list[Load]:
    """The first `limit` lines of a trace file. Raises `ConfigError` naming the line that is wrong."""
    loads: list[Load] = []
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            if limit is not None and len(loads) == limit:
                break
            if raw.strip():
                loads.append(_load(path, number, raw))
    if not loads:
        raise ConfigError(f"--trace {path}: no requests in it")
    return loads


def _load(path: Path, number: int, raw: bytes) -> Load:
    try:
        line = msgspec.json.decode(raw, type=TraceLine)
    except msgspec.DecodeError as error:
        raise ConfigError(f"--trace {path}, line {number}: {error}") from None
    if line.arrival_s < 0 or line.prompt_tokens < 1 or line.output_tokens < 1:
        raise ConfigError(f"--trace {path}, line {number}: times are at least 0, token counts at least 1")
    return Load(line.arrival_s, line.prompt_tokens, line.output_tokens)


def at_rate(loads: Sequence[Load], rate: float, seed: int) -> list[Load]:
    """The same requests at `rate` a second on average: times are scaled, or Poisson where all are equal."""
    span = loads[-1].due_s - loads[0].due_s
    if span > 0:
        scale = (len(loads) - 1) / rate / span
        return [replace(load, due_s=(load.due_s - loads[0].due_s) * scale) for load in loads]
    rng = random.Random(seed)
    times = itertools.accumulate(rng.expovariate(rate) for _ in loads)
    return [replace(load, due_s=due_s) for load, due_s in zip(loads, times, strict=True)]


def all_at_once(loads: Sequence[Load]) -> list[Load]:
    return [replace(load, due_s=0.0) for load in loads]


def scaled_lengths(loads: Sequence[Load], factor: float) -> list[Load]:
    """Prompts and answers `factor` times as long, at least one token each."""
    return [
        replace(
            load,
            prompt_tokens=max(1, round(load.prompt_tokens * factor)),
            output_tokens=max(1, round(load.output_tokens * factor)),
        )
        for load in loads
    ]


def fitted(loads: Sequence[Load], max_model_len: int) -> tuple[list[Load], int]:
    """Requests that fit the context, and how many had to be cut: the answer to half of it, then the prompt."""
    fit = [_fit(load, max_model_len) for load in loads]
    return fit, sum(1 for before, after in zip(loads, fit, strict=True) if before != after)


def _fit(load: Load, max_model_len: int) -> Load:
    if load.prompt_tokens + load.output_tokens <= max_model_len:
        return load
    output = min(load.output_tokens, max(1, max_model_len // 2))
    return replace(load, prompt_tokens=min(load.prompt_tokens, max_model_len - output), output_tokens=output)


def make_prompts(loads: Sequence[Load], vocab_size: int, seed: int) -> list[list[int]]:
    """A prompt of the exact length for each request: random ordinary token ids, the same for the same seed."""
    rng = random.Random(seed)
    low = min(FIRST_ORDINARY_ID, vocab_size // 2)
    return [[rng.randrange(low, vocab_size) for _ in range(load.prompt_tokens)] for load in loads]
