"""Sequences in levels, each a queue: what all multi-level policies are made of."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator

from fastserve_hpc.core.sequence import Sequence


class Levels:
    """Queues by level, the lowest number first. Finds first and last in constant time, at any length."""

    def __init__(self) -> None:
        self._queues: dict[float, OrderedDict[int, Sequence]] = {}
        self._levels: list[float] = []
        """Those whose queues are not empty, ascending."""

    def put(self, level: float, sequence: Sequence) -> None:
        """At the tail of the level's queue."""
        queue = self._queues.get(level)
        if queue is None:
            # A linked list: a plain dict would step over its deleted head entries again and again.
            queue = self._queues[level] = OrderedDict()
            insort(self._levels, level)
        queue[sequence.request_id] = sequence

    def take_out(self, level: float, sequence: Sequence) -> None:
        queue = self._queues[level]
        del queue[sequence.request_id]
        if not queue:
            del self._queues[level]
            del self._levels[bisect_left(self._levels, level)]

    def last(self) -> Sequence | None:
        """The one behind all others."""
        if not self._levels:
            return None
        queue = self._queues[self._levels[-1]]
        return queue[next(reversed(queue))]

    def __iter__(self) -> Iterator[Sequence]:
        for level in self._levels:
            yield from self._queues[level].values()

    def __reversed__(self) -> Iterator[Sequence]:
        for level in reversed(self._levels):
            yield from reversed(self._queues[level].values())

    def counts(self) -> dict[float, int]:
        """How many there are in each level that has any."""
        return {level: len(self._queues[level]) for level in self._levels}
