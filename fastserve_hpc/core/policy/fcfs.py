"""First come, first served."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from fastserve_hpc.core.policy.base import OrderKey
from fastserve_hpc.core.sequence import Sequence


class Fcfs:
    """Order of arrival; a preempted request keeps its place."""

    name = "fcfs"

    def __init__(self) -> None:
        # A linked list: a plain dict would step over its deleted head entries again and again.
        self._queue: OrderedDict[int, Sequence] = OrderedDict()
        self._numbers: dict[int, int] = {}
        self._num_arrived = 0

    def add(self, sequence: Sequence, now: float) -> None:  # noqa: ARG002
        self._num_arrived += 1
        self._queue[sequence.request_id] = sequence
        self._numbers[sequence.request_id] = self._num_arrived

    def remove(self, sequence: Sequence, is_complete: bool) -> None:  # noqa: ARG002
        del self._queue[sequence.request_id]
        del self._numbers[sequence.request_id]

    def on_progress(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        """Progress changes nothing."""

    def ranked(self, now: float) -> Iterator[Sequence]:  # noqa: ARG002
        return iter(self._queue.values())

    def counters(self) -> dict[str, float]:
        return {}

    def order_key(self, sequence: Sequence) -> OrderKey:
        return (self._numbers[sequence.request_id],)
