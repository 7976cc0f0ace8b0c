"""Policies that know the length of every answer: what could be had at best. For simulations and benchmarks.

They take `max_tokens` for the truth, which it is where nothing but the length ends an answer.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from fastserve_hpc.core.cost import CostModel
from fastserve_hpc.core.policy.base import OrderKey
from fastserve_hpc.core.sequence import Sequence


class Srpt:
    """Shortest remaining processing time first."""

    name = "srpt"

    def __init__(self, max_batch: int, cost: CostModel):
        self._max_batch = max_batch
        self._cost = cost
        self._keys: dict[int, tuple[float, int]] = {}
        self._order: list[tuple[float, int]] = []
        self._sequences: dict[int, Sequence] = {}

    def add(self, sequence: Sequence, now: float) -> None:  # noqa: ARG002
        self._sequences[sequence.request_id] = sequence
        self._insert(sequence)

    def remove(self, sequence: Sequence, is_complete: bool) -> None:  # noqa: ARG002
        del self._sequences[sequence.request_id]
        self._take_out(sequence)

    def on_progress(self, sequence: Sequence, num_tokens: int, now: float) -> None:  # noqa: ARG002
        self._take_out(sequence)
        self._insert(sequence)

    def ranked(self, now: float) -> Iterator[Sequence]:  # noqa: ARG002
        return (self._sequences[request_id] for _, request_id in self._order)

    def counters(self) -> dict[str, float]:
        return {}

    def order_key(self, sequence: Sequence) -> OrderKey:
        return self._keys[sequence.request_id]

    def _insert(self, sequence: Sequence) -> None:
        key = self._keys[sequence.request_id] = (self._size(sequence), sequence.request_id)
        insort(self._order, key)

    def _take_out(self, sequence: Sequence) -> None:
        del self._order[bisect_left(self._order, self._keys.pop(sequence.request_id))]

    def _size(self, sequence: Sequence) -> float:
        return self._remaining_s(sequence)

    def _remaining_s(self, sequence: Sequence) -> float:
        costs = self._cost.costs
        prompt = 0.0 if sequence.outputs else costs.prefill_s(sequence.num_planned, sequence.num_prompt)
        return prompt + (sequence.max_tokens - len(sequence.outputs)) * costs.output_token_s(self._max_batch)


class Oracle(Srpt):
    """The least remaining cost times output length first: for seconds per output token a better guide than SRPT."""

    name = "oracle"

    def _size(self, sequence: Sequence) -> float:
        return self._remaining_s(sequence) * sequence.max_tokens
