"""How long answers have been lately: what is expected of those whose length nobody knows."""

from __future__ import annotations

from collections import deque

WINDOW = 200
_HARMONIC_PRIOR = (4, 50)
_MEAN_PRIOR = (20, 200)
"""So many answers of so many tokens, before there were any."""


class FinishedLengths:
    """Means of the output lengths of the last requests that finished."""

    def __init__(self) -> None:
        self.num_finished = 0
        """Since the start."""
        self.harmonic = float(_HARMONIC_PRIOR[1])
        """The harmonic mean: where the many short ones are."""
        self.mean = float(_MEAN_PRIOR[1])
        self._recent: deque[int] = deque()
        self._sum = 0
        self._inverse_sum = 0.0

    def note(self, num_tokens: int) -> None:
        """A request has finished with so many output tokens, at least one."""
        self.num_finished += 1
        self._recent.append(num_tokens)
        self._sum += num_tokens
        self._inverse_sum += 1 / num_tokens
        if len(self._recent) > WINDOW:
            gone = self._recent.popleft()
            self._sum -= gone
            self._inverse_sum -= 1 / gone
        count = len(self._recent)
        self.harmonic = (count + _HARMONIC_PRIOR[0]) / (self._inverse_sum + _HARMONIC_PRIOR[0] / _HARMONIC_PRIOR[1])
        self.mean = (self._sum + _MEAN_PRIOR[0] * _MEAN_PRIOR[1]) / (count + _MEAN_PRIOR[0])
