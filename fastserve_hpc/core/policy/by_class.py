"""Class `interactive` before class `batch`, each in the order of a policy of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from fastserve_hpc.core.enst import Leveled, Standing
from fastserve_hpc.core.policy.base import OrderKey, Policy
from fastserve_hpc.core.sequence import Sequence

_BELOW_S = 1e9


class ByClass:
    """Two policies of a kind. What either learns of its requests says nothing of the other class."""

    def __init__(self, make: Callable[[], Policy]) -> None:
        self._interactive, self._batch = make(), make()
        self.name = self._interactive.name

    def add(self, sequence: Sequence, now: float) -> None:
        self._of(sequence).add(sequence, now)

    def remove(self, sequence: Sequence, is_complete: bool) -> None:
        self._of(sequence).remove(sequence, is_complete)

    def on_progress(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        self._of(sequence).on_progress(sequence, num_tokens, now)

    def ranked(self, now: float) -> Iterator[Sequence]:
        yield from self._interactive.ranked(now)
        yield from self._batch.ranked(now)

    def counters(self) -> dict[str, float]:
        """Of the interactive class under their own names."""
        batch = {f"batch_{name}": value for name, value in self._batch.counters().items()}
        return {**self._interactive.counters(), **batch}

    def order_key(self, sequence: Sequence) -> OrderKey:
        return (float(sequence.request.service_class == "batch"), *self._of(sequence).order_key(sequence))

    def standing(self, sequence: Sequence, now: float) -> Standing:
        """Class `batch` is below every level of the other; without levels there are these two."""
        policy, is_batch = self._of(sequence), sequence.request.service_class == "batch"
        standing = policy.standing(sequence, now) if isinstance(policy, Leveled) else Standing(0.0, math.inf)
        return standing._replace(quantum_s=standing.quantum_s + _BELOW_S * is_batch)

    def _of(self, sequence: Sequence) -> Policy:
        return self._batch if sequence.request.service_class == "batch" else self._interactive
