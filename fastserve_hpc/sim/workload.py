"""What comes when: requests from a trace or drawn from quantiles, at a given rate."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random
from typing import Any, Protocol

from fastserve_hpc.core.request import ServiceClass
from fastserve_hpc.errors import ConfigError
from fastserve_hpc.sim.lengths import QuantileLengths


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a workload."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    hint: int | None = None
    """What the client says of the output's length."""
    session: str | None = None
    service_class: ServiceClass = "interactive"


class Source(Protocol):
    """Where workloads come from."""

    def draw(self, count: int, rate: float, rng: Random) -> list[Arrival]:
        """`count` requests, `rate` a second on average."""


@dataclass(frozen=True, slots=True)
class Gaps:
    """How arrivals are spread: Gamma gaps; of variation 1 they are Poisson's."""

    variation: float = 1.0
    """Standard deviation of the gaps over their mean."""

    def times(self, count: int, rate: float, rng: Random) -> list[float]:
        shape = self.variation**-2
        gaps = (rng.gammavariate(shape, 1.0 / (shape * rate)) for _ in range(count - 1))
        return list(accumulate(gaps, initial=0.0))


@dataclass(frozen=True, slots=True)
class DrawnSource:
    """Independent lengths at random times."""

    lengths: QuantileLengths
    gaps: Gaps = Gaps()

    def draw(self, count: int, rate: float, rng: Random) -> list[Arrival]:
        """See `Source`."""
        times = self.gaps.times(count, rate, rng)
        return [Arrival(time, *self.lengths.draw(rng)) for time in times]


@dataclass(frozen=True, slots=True)
class TraceSource:
    """Stretches of a trace, their times scaled to the rate.

    A trace without times is drawn from at random. Without `gaps` its own times are kept, spread
    evenly inside the steps if they come in steps.
    """

    rows: tuple[Arrival, ...]
    gaps: Gaps | None = None

    def draw(self, count: int, rate: float, rng: Random) -> list[Arrival]:
        """See `Source`."""
        has_times = self.rows[-1].arrival_s > self.rows[0].arrival_s
        rows = self._stretch(count, rng) if has_times else rng.choices(self.rows, k=count)
        if has_times and self.gaps is None:
            times = _scaled(_unstepped([row.arrival_s for row in rows], rng), rate)
        else:
            times = (self.gaps or Gaps()).times(count, rate, rng)
        return [replace(row, arrival_s=time) for row, time in zip(rows, times, strict=True)]

    def _stretch(self, count: int, rng: Random) -> Sequence[Arrival]:
        if count > len(self.rows):
            raise ConfigError(f"--requests {count}: the trace has only {len(self.rows)}")
        begin = rng.randrange(len(self.rows) - count + 1)
        return self.rows[begin : begin + count]


def _unstepped(times: list[float], rng: Random) -> list[float]:
    """Times that come in steps (many at once, then none) spread at random over their step."""
    distinct = sorted(set(times))
    if len(distinct) < 2 or len(distinct) > len(times) / 2:
        return times
    step = min(later - earlier for earlier, later in pairwise(distinct))
    return sorted(time + step * rng.random() for time in times)


def _scaled(times: list[float], rate: float) -> list[float]:
    span = times[-1] - times[0]
    if span <= 0:
        raise ConfigError("the trace's requests come all at once: choose --arrivals poisson")
    scale = (len(times) - 1) / rate / span
    return [(time - times[0]) * scale for time in times]


def read_trace(path: Path, prompt_scale: float = 1.0, output_scale: float = 1.0) -> tuple[Arrival, ...]:
    """All rows of a trace (JSON lines of arrival_s, prompt_tokens, output_tokens). Raises `ConfigError`."""
    rows = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                rows.append(_row(f"--trace {path}, line {number}", line, prompt_scale, output_scale))
    if not rows:
        raise ConfigError(f"--trace {path}: no requests in it")
    return tuple(sorted(rows, key=lambda row: row.arrival_s))


def _row(place: str, line: bytes, prompt_scale: float, output_scale: float) -> Arrival:
    try:
        values: dict[str, Any] = json.loads(line)
        time, prompt, output = (float(values[key]) for key in ("arrival_s", "prompt_tokens", "output_tokens"))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{place}: arrival_s, prompt_tokens and output_tokens are needed: {error!r}") from None
    if not (0 <= time < math.inf and prompt >= 1 and output >= 1):
        raise ConfigError(f"{place}: times are at least 0, token counts at least 1")
    return Arrival(time, max(1, round(prompt * prompt_scale)), max(1, round(output * output_scale)))


class Hints:
    """What clients say of their output lengths: nothing, the truth, or something else.

    none | exact | noisy:X (off by up to the part X, as 0.5) | scaled:X (always X times as much) |
    wrong:X (X times as much or as little) | shuffled (another request's length).
    """

    def __init__(self, text: str):
        self.text = text
        self._kind, _, number = text.partition(":")
        takes_number = self._kind in ("noisy", "scaled", "wrong")
        try:
            self._number = float(number) if takes_number else 0.0
        except ValueError:
            takes_number = not takes_number
        known = takes_number or self._kind in ("none", "exact", "shuffled")
        if not known or takes_number != bool(number) or not 0 <= self._number < math.inf:
            raise ConfigError(f"--hints {text}: use none, exact, noisy:X, scaled:X, wrong:X or shuffled, as noisy:0.5")

    def put(self, arrivals: Sequence[Arrival], rng: Random) -> list[Arrival]:
        """The same requests with their hints."""
        if self._kind == "none":
            return list(arrivals)
        lengths: list[float] = [arrival.output_tokens for arrival in arrivals]
        if self._kind == "shuffled":
            rng.shuffle(lengths)
        hints = (max(1, round(length * self._factor(rng))) for length in lengths)
        return [replace(arrival, hint=hint) for arrival, hint in zip(arrivals, hints, strict=True)]

    def _factor(self, rng: Random) -> float:
        if self._kind == "noisy":
            return 1 + self._number * rng.uniform(-1, 1)
        if self._kind == "scaled":
            return self._number
        if self._kind == "wrong":
            return self._number if rng.random() < 0.5 else 1 / max(self._number, 1e-9)
        return 1.0
