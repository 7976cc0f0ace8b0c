"""What clients say of their output lengths, believed only as far as it has been right."""

from __future__ import annotations

import math
from collections import deque

WINDOW = 200
MIN_OBSERVED = 32
MIN_EXPLAINED = 0.5
"""Of the variance of log lengths, the part that hints must have explained."""


class HintTrust:
    """Compares hints with what came of them, over the last finished requests that had one."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        """(log of the actual length, log of actual / hint)"""
        self._factor: float | None = None

    @property
    def is_trusted(self) -> bool:
        return self._factor is not None

    def note(self, hint: int, actual: int) -> None:
        """A request with this hint has finished with so many tokens, at least one."""
        self._recent.append((math.log(actual), math.log(actual / max(1, hint))))
        errors = [error for _, error in self._recent]
        mean_error = math.fsum(errors) / len(errors)
        self._factor = math.exp(mean_error) if self._is_good(errors) else None

    def expected(self, hint: int) -> float | None:
        """The length to expect, hints' common bias taken off; None while hints are not to be trusted."""
        return None if self._factor is None else max(1.0, hint * self._factor)

    def _is_good(self, errors: list[float]) -> bool:
        if len(errors) < MIN_OBSERVED:
            return False
        total = _variance([length for length, _ in self._recent])
        return total > 0 and 1 - _variance(errors) / total >= MIN_EXPLAINED


def _variance(values: list[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / len(values)
