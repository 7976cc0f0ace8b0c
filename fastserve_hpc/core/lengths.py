"""How long answers have been lately: what is expected of those whose length nobody knows."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque

WINDOW = 200
_HARMONIC_PRIOR = (4, 50)
_MEAN_PRIOR = (20, 200)
"""So many answers of so many tokens, before there were any."""
_TAIL_WEIGHT = 2.0
"""Of the assumption that one goes on for as long as it has gone on; where few have been longer, it decides."""
_REFRESH_EVERY = 16
_STEPS_PER_DOUBLING = 4


class FinishedLengths:
    """Output lengths of the last requests that finished, and what follows for the next."""

    def __init__(self) -> None:
        self.num_finished = 0
        """Since the start."""
        self.harmonic = float(_HARMONIC_PRIOR[1])
        """The harmonic mean: where the many short ones are."""
        self.mean = float(_MEAN_PRIOR[1])
        self._recent: deque[int] = deque()
        self._ordered: list[int] = []
        self._sum = 0
        self._inverse_sum = 0.0
        self._sizes: dict[tuple[int, int], float] = {}

    def note(self, num_tokens: int) -> None:
        """A request has finished with so many output tokens, at least one."""
        self.num_finished += 1
        self._recent.append(num_tokens)
        insort(self._ordered, num_tokens)
        self._sum += num_tokens
        self._inverse_sum += 1 / num_tokens
        if len(self._recent) > WINDOW:
            self._drop(self._recent.popleft())
        count = len(self._recent)
        self.harmonic = (count + _HARMONIC_PRIOR[0]) / (self._inverse_sum + _HARMONIC_PRIOR[0] / _HARMONIC_PRIOR[1])
        self.mean = (self._sum + _MEAN_PRIOR[0] * _MEAN_PRIOR[1]) / (count + _MEAN_PRIOR[0])
        if self.num_finished % _REFRESH_EVERY == 0:
            self._sizes.clear()

    def _drop(self, num_tokens: int) -> None:
        self._ordered.pop(bisect_right(self._ordered, num_tokens) - 1)
        self._sum -= num_tokens
        self._inverse_sum -= 1 / num_tokens

    def size(self, outputs: int, extra: float = 0.0) -> float:
        """How much work, in tokens, a request stands for that has had so many outputs and has not ended.

        For one of known length L it is sqrt((extra + L - outputs) * L): for seconds per token, the least of it
        should run first. Of an unknown length it is the root of the inverse of Gittins' index: the least
        work per finished request of weight 1 / L that some quantum promises. `extra` is work before the
        next output. Arguments are rounded to steps of a quarter of a doubling; values are kept for a while.
        """
        key = (_step(outputs), _step(extra))
        size = self._sizes.get(key)
        if size is None:
            size = self._sizes[key] = self._size(_value(key[0]), _value(key[1]))
        return size

    def _size(self, outputs: float, extra: float) -> float:
        longer = self._ordered[bisect_right(self._ordered, outputs) :]
        tail = max(2 * outputs, self.mean)
        lengths = sorted([*((length, 1.0) for length in longer), (tail, _TAIL_WEIGHT)])
        left = total = len(longer) + _TAIL_WEIGHT
        best, done, weight = math.inf, 0.0, 0.0
        for length, count in lengths:
            done += count * (length - outputs)
            left -= count
            weight += count / length
            work = done + left * (length - outputs) + total * extra
            best = min(best, work / weight)
        return math.sqrt(best)


def _step(tokens: float) -> int:
    return 0 if tokens < 1 else 1 + int(_STEPS_PER_DOUBLING * math.log2(tokens))


def _value(step: int) -> float:
    return 0.0 if step == 0 else float(2 ** ((step - 1) / _STEPS_PER_DOUBLING))
