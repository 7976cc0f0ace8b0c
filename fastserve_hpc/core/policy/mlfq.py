"""Multi-level feedback queues with quanta of wall-clock time: the naive one and the paper's."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from fastserve_hpc.core.cost import CostModel, IterationLoad, prefill_attention
from fastserve_hpc.core.enst import Standing
from fastserve_hpc.core.policy.base import OrderKey
from fastserve_hpc.core.policy.levels import Levels
from fastserve_hpc.core.sequence import Sequence

NUM_LEVELS = 24
RATIO = 2.0
STARVATION_BOUND_S = 20.0


@dataclass(slots=True, eq=False)
class _Entry:
    sequence: Sequence
    level: int
    order: int
    last_ran: float
    """When it last made progress; its arrival before it has."""
    service_s: float = 0.0
    """At this level."""


class Mlfq:
    """Everyone enters level 0. One that has used up its level's quantum goes to the tail of the next.

    quantum(k) = q0 * 2^k with q0 the shortest iteration; the first of all levels run.
    """

    name = "mlfq"

    def __init__(self, cost: CostModel, num_stages: int = 1):
        """`cost` is that of a stage, of `num_stages` alike."""
        self._cost = cost
        self._num_stages = num_stages
        self._entries: dict[int, _Entry] = {}
        self._levels = Levels()
        self._order = 0
        self._scheduled_at = 0.0

    def add(self, sequence: Sequence, now: float) -> None:
        entry = _Entry(sequence, self._first_level(sequence), 0, now)
        self._entries[sequence.request_id] = entry
        self._put(entry)

    def remove(self, sequence: Sequence, is_complete: bool) -> None:  # noqa: ARG002
        entry = self._entries.pop(sequence.request_id)
        self._levels.take_out(entry.level, sequence)

    def on_progress(self, sequence: Sequence, num_tokens: int, now: float) -> None:  # noqa: ARG002
        entry = self._entries[sequence.request_id]
        entry.service_s += now - max(entry.last_ran, self._scheduled_at)
        entry.last_ran = now
        if entry.service_s > self._quantum_s(entry.level):
            self._move(entry, min(entry.level + 1, NUM_LEVELS - 1))

    def ranked(self, now: float) -> Iterator[Sequence]:
        self._scheduled_at = now
        return iter(self._levels)

    def counters(self) -> dict[str, float]:
        return {f"level_{level:g}": count for level, count in self._levels.counts().items()}

    def order_key(self, sequence: Sequence) -> OrderKey:
        entry = self._entries[sequence.request_id]
        return (entry.level, entry.order)

    def standing(self, sequence: Sequence, now: float) -> Standing:  # noqa: ARG002
        return Standing(self._quantum_s(self._entries[sequence.request_id].level), math.inf)

    def _first_level(self, sequence: Sequence) -> int:  # noqa: ARG002
        return 0

    def _quantum_s(self, level: int) -> float:
        return float(self._iteration_s(IterationLoad(decode_sequences=1)) * RATIO**level)

    def _iteration_s(self, load: IterationLoad) -> float:
        return self._cost.costs.predict(load) * self._num_stages

    def _move(self, entry: _Entry, level: int) -> None:
        self._levels.take_out(entry.level, entry.sequence)
        entry.level, entry.service_s = level, 0.0
        self._put(entry)

    def _put(self, entry: _Entry) -> None:
        self._order += 1
        entry.order = self._order
        self._levels.put(entry.level, entry.sequence)


class PaperSkipJoin(Mlfq):
    """The FastServe paper's rule, literally (arXiv 2305.05920, Algorithm 1), for comparison.

    A request joins the highest level whose quantum holds its first iteration. One that has waited past
    the bound is promoted to level 0.
    """

    name = "skip-join-paper"

    def __init__(self, cost: CostModel, num_stages: int = 1, starvation_bound_s: float = STARVATION_BOUND_S):
        super().__init__(cost, num_stages)
        self._bound_s = starvation_bound_s
        self._num_promoted = 0
        self._by_wait: OrderedDict[int, _Entry] = OrderedDict()
        """The one first whose last progress is longest ago."""

    def add(self, sequence: Sequence, now: float) -> None:
        super().add(sequence, now)
        self._by_wait[sequence.request_id] = self._entries[sequence.request_id]

    def remove(self, sequence: Sequence, is_complete: bool) -> None:
        super().remove(sequence, is_complete)
        del self._by_wait[sequence.request_id]

    def on_progress(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        super().on_progress(sequence, num_tokens, now)
        self._by_wait.move_to_end(sequence.request_id)

    def ranked(self, now: float) -> Iterator[Sequence]:
        self._promote(now)
        return super().ranked(now)

    def standing(self, sequence: Sequence, now: float) -> Standing:
        waited_s = now - self._entries[sequence.request_id].last_ran
        return super().standing(sequence, now)._replace(promoted_in_s=max(0.0, self._bound_s - waited_s))

    def counters(self) -> dict[str, float]:
        return {**super().counters(), "promoted": self._num_promoted}

    def _promote(self, now: float) -> None:
        """Those that have waited too long, to the tail of level 0; their wait begins again."""
        while self._by_wait:
            entry = next(iter(self._by_wait.values()))
            if now - entry.last_ran <= self._bound_s:
                return
            entry.last_ran = now
            self._num_promoted += 1
            self._by_wait.move_to_end(entry.sequence.request_id)
            self._move(entry, 0)

    def _first_level(self, sequence: Sequence) -> int:
        count = sequence.num_prompt
        first_s = self._iteration_s(IterationLoad(count, prefill_attention(0, count)))
        return next((k for k in range(NUM_LEVELS) if self._quantum_s(k) >= first_s), NUM_LEVELS - 1)
