"""What an iteration costs, as a linear function of what is in it.

    seconds = c0 + c1 * prefill_tokens + c2 * prefill_attention + c3 * decode_sequences + c4 * kv_tokens_read

The same model places requests in levels, and drives the simulator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple

from fastserve_hpc.core.plan import SequenceSlice


class IterationLoad(NamedTuple):
    """What is computed in one iteration, as far as it takes time."""

    prefill_tokens: int = 0
    prefill_attention: int = 0
    """Over all prefill positions, the number of positions that each attends to."""
    decode_sequences: int = 0
    kv_tokens_read: int = 0
    """Positions whose KV is read: by a decode its whole context, by a chunk what is before it."""


def load_of(slices: Iterable[SequenceSlice]) -> IterationLoad:
    """The load of a plan's slices. One of a single token is a decode, whatever it computes."""
    prefill_tokens = attention = decodes = kv_tokens = 0
    for piece in slices:
        start, count = piece[1], piece[2]
        if count == 1:
            decodes += 1
            kv_tokens += start + 1
        else:
            prefill_tokens += count
            attention += prefill_attention(start, start + count)
            kv_tokens += start
    return IterationLoad(prefill_tokens, attention, decodes, kv_tokens)


def prefill_attention(start: int, end: int) -> int:
    """Positions attended to by positions [start, end): each by itself and those before it."""
    return (end - start) * (start + end + 1) // 2


@dataclass(frozen=True, slots=True)
class Costs:
    """The coefficients, in seconds. The defaults are of a small model on two cores of a server processor."""

    fixed_s: float = 6e-3
    """Whatever is in it: weights read, launches, latencies."""
    prefill_token_s: float = 5e-4
    prefill_attention_s: float = 2e-8
    decode_sequence_s: float = 5e-4
    kv_token_s: float = 4e-8

    def scaled(self, factor: float) -> Costs:
        """The same times `factor`: those of a stage, say, of a pipeline of alike ones."""
        return Costs(*(value * factor for value in astuple(self)))

    def predict(self, load: IterationLoad) -> float:
        """Seconds that an iteration takes."""
        return (
            self.fixed_s
            + self.prefill_token_s * load.prefill_tokens
            + self.prefill_attention_s * load.prefill_attention
            + self.decode_sequence_s * load.decode_sequences
            + self.kv_token_s * load.kv_tokens_read
        )

    def prefill_s(self, start: int, end: int) -> float:
        """Seconds that prompt positions [start, end) add to the iterations they are in."""
        return self.prefill_token_s * (end - start) + self.prefill_attention_s * prefill_attention(start, end)

    def output_token_s(self, batch: int) -> float:
        """One output token's share of an iteration of `batch` sequences."""
        return self.decode_sequence_s + self.fixed_s / batch


_NUM = 5
_FORGET = 0.998
"""Weight of an observation after each later one: about the last 500 count."""
_PRIOR_WEIGHT = 1e-3
"""A coefficient that is off its prior by a factor 2 weighs as much as one iteration that is off by 3 %."""
_REFIT_EVERY = 16
_MAX_SURPRISE = 4.0
"""One iteration counts as at most so many times as long, or as short, as predicted: a rank may have been held up."""
_NUM_TRUSTED = 64
"""Observations before which no surprise is cut: the prior may be of another machine."""


Measurement = tuple[IterationLoad, float]
"""An iteration and the seconds that it took."""


class CostModel:
    """The costs as known now: where they began, refitted by least squares to what iterations took.

    Errors count relative to the time taken, old ones fade, and what the recent iterations do not tell
    (a batch that only decodes says nothing of prompts) stays near its prior.
    """

    def __init__(self, costs: Costs | None = None):
        self.costs = costs or Costs()
        self.num_observed = 0
        self.relative_error: float | None = None
        """|predicted - taken| / taken, averaged over recent iterations; None before the first."""
        self._prior = astuple(self.costs)
        self._products = [[0.0] * _NUM for _ in range(_NUM)]
        self._targets = [0.0] * _NUM

    @classmethod
    def calibrated(cls, measurements: Sequence[Measurement]) -> CostModel:
        """A model that begins with what was measured; `relative_error` is that of the fit. At least one, above 0 s."""
        usual = Costs()
        speeds = sorted(seconds / usual.predict(load) for load, seconds in measurements)
        found = cls(usual.scaled(speeds[len(speeds) // 2]))
        for load, seconds in measurements:
            found._accumulate((1.0, *map(float, load)), seconds)
        found._refit()
        model = cls(found.costs)
        errors = [abs(found.costs.predict(load) - seconds) / seconds for load, seconds in measurements]
        model.relative_error = sum(errors) / len(errors)
        return model

    def observe(self, load: IterationLoad, seconds: float) -> None:
        """An iteration took so long. Zero or less is not a measurement and is ignored."""
        if seconds <= 0:
            return
        predicted = self.costs.predict(load)
        error = abs(predicted - seconds) / seconds
        known = self.relative_error
        self.relative_error = error if known is None else known + 0.05 * (error - known)
        if self.num_observed > _NUM_TRUSTED:
            seconds = min(max(seconds, predicted / _MAX_SURPRISE), predicted * _MAX_SURPRISE)
        self._accumulate((1.0, *map(float, load)), seconds)
        self.num_observed += 1
        if self.num_observed % _REFIT_EVERY == 0 or self.num_observed < _REFIT_EVERY:
            self._refit()

    def _accumulate(self, features: tuple[float, ...], seconds: float) -> None:
        scaled = [feature / seconds for feature in features]
        for i, row in enumerate(self._products):
            for j in range(_NUM):
                row[j] = row[j] * _FORGET + scaled[i] * scaled[j]
            self._targets[i] = self._targets[i] * _FORGET + scaled[i]

    def _refit(self) -> None:
        """Least squares, held to the prior; a coefficient that would be negative stays at a trace of its prior."""
        free = list(range(_NUM))
        fitted = [value * 1e-3 for value in self._prior]
        while free:
            solution = self._solve(free, fitted)
            negative = [i for i, value in zip(free, solution, strict=True) if value < fitted[i]]
            if not negative:
                for i, value in zip(free, solution, strict=True):
                    fitted[i] = value
                break
            free = [i for i in free if i not in negative]
        self.costs = Costs(*fitted)

    def _solve(self, free: list[int], fixed: list[float]) -> list[float]:
        """The free coefficients, the others being as in `fixed`. In units of the prior: all are of like size."""
        prior, held = self._prior, [i for i in range(_NUM) if i not in free]
        matrix = []
        for i in free:
            row = [self._products[i][j] * prior[i] * prior[j] + _PRIOR_WEIGHT * (i == j) for j in free]
            known = sum(self._products[i][j] * fixed[j] for j in held)
            matrix.append([*row, (self._targets[i] - known) * prior[i] + _PRIOR_WEIGHT])
        return [value * prior[i] for i, value in zip(free, _eliminate(matrix), strict=True)]


def _eliminate(matrix: list[list[float]]) -> list[float]:
    """Solve a positive definite system, given with its right-hand side as last column."""
    size = len(matrix)
    for i in range(size):
        pivot = matrix[i]
        for row in matrix[i + 1 :]:
            factor = row[i] / pivot[i]
            for j in range(i, size + 1):
                row[j] -= factor * pivot[j]
    solution = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(matrix[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (matrix[i][size] - rest) / matrix[i][i]
    return solution
