"""Who has been there for too long: requests that wait, and those in the batch whose prompt is not done."""

from __future__ import annotations

from fastserve_hpc.core.policy.entry import Entry
from fastserve_hpc.core.policy.entry_heap import EntryHeap

_MAX_DOUBLINGS = 40.0
_MAX_AGED = 4
"""Of one look, which comes before every iteration: more than finish in one on average."""


class Aging:
    """Requests that have not come of age, by arrival: a heap for each bound."""

    def __init__(self) -> None:
        self._by_bound: dict[float, EntryHeap] = {}

    def watch(self, entry: Entry) -> None:
        """From now on, where it is now; when it moves it is watched anew."""
        if not entry.is_aged and (entry.is_prefilling or not entry.is_running):
            self._by_bound.setdefault(_level_that_counts(entry), EntryHeap()).push((), entry)

    def due(self, now: float, bound_s: float, usual_level: float) -> list[Entry]:
        """Those that have been there past their bound, a few at a time. They are not watched any more."""
        found: list[Entry] = []
        for level, heap in list(self._by_bound.items()):
            level_bound_s = bound_s * _factor(level, usual_level)
            while len(found) < _MAX_AGED and (entry := heap.top()) and now - entry.arrived >= level_bound_s:
                heap.pop()
                found.append(entry)
            if heap.top() is None:
                del self._by_bound[level]
        return found


def factor_of(entry: Entry, usual_level: float) -> float:
    """The bound doubles with each level past the usual one."""
    return _factor(_level_that_counts(entry), usual_level)


def _factor(level: float, usual_level: float) -> float:
    return float(2 ** min(max(0.0, level - usual_level), _MAX_DOUBLINGS))


def _level_that_counts(entry: Entry) -> float:
    """Before there is any token a level tells of the prompt, unless there is a hint."""
    return entry.level if entry.sequence.outputs or entry.is_hinted else 0.0
