"""The requests that wait for a place: who is next, who is oldest, who has waited too long."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

from fastserve_hpc.core.policy.sessions import Session
from fastserve_hpc.core.sequence import Sequence

_MAX_AGED = 4
"""Of one look, which comes before every iteration: more than finish in one on average."""

_Heap = list[tuple[tuple[float, ...], int, "Entry"]]


@dataclass(slots=True, eq=False)
class Entry:
    """A sequence, and where it stands."""

    sequence: Sequence
    number: int
    """Counts arrivals."""
    arrived: float
    prompt_left: int
    """Prompt tokens that are not computed yet."""
    level: float = 0.0
    order: int = 0
    """Counts entries into queues."""
    place: float = 0.0
    """While it runs: the level that it is filed under."""
    end: int = 0
    """The outputs at which its level ends."""
    limit: int = 0
    """The outputs from which on progress is looked at."""
    is_running: bool = False
    is_prefilling: bool = False
    """While it runs: it is filed with those whose prompt is not done."""
    was_running: bool = False
    """It waits because another took its place."""
    is_hinted: bool = False
    """Its level comes from a hint that was trusted."""
    is_aged: bool = False
    aged_order: int = 0
    """Counts those that became aged."""
    is_pinned: bool = False
    session: Session | None = None
    stay: int = 0
    """Counts its stays in the queue; what the heaps hold of earlier ones is void."""
    wait_key: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)


class Waiting:
    """Everything in heaps whose void items are dropped when they come to the top: no cost grows with the queue."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._by_key: _Heap = []
        self._num_aged = 0
        self._by_level: _Heap = []
        self._by_arrival: _Heap = []
        self._by_bound: dict[float, _Heap] = {}
        """Not aged yet, by arrival: a heap for each level, and one (-1) for those that have not begun."""

    @property
    def is_empty(self) -> bool:
        return not self._entries

    def put(self, entry: Entry) -> None:
        entry.stay += 1
        self._entries[entry.number] = entry
        self._file(entry)
        self._push(self._by_level, (entry.level, float(not entry.was_running), float(entry.order)), entry)
        self._push(self._by_arrival, (entry.number,), entry)
        if not entry.is_aged:
            self._push(self._by_bound.setdefault(_bound_of(entry), []), (entry.number,), entry)

    def take_out(self, entry: Entry) -> None:
        entry.stay += 1
        del self._entries[entry.number]

    def first(self) -> Entry | None:
        """The one that gets the next free place: pinned; aged, those without a token first; then by level, those
        replaced first."""
        return self._top(self._by_key)

    def best(self) -> Entry | None:
        """The one with the best level."""
        return self._top(self._by_level)

    def oldest(self) -> Entry | None:
        """The first to arrive."""
        return self._top(self._by_arrival)

    def age(self, now: float, bound_s: float, usual_level: float) -> int:
        """Those that have waited past their bound become the first, a few at a time. How many did."""
        count = 0
        for bound, heap in list(self._by_bound.items()):
            level_bound_s = bound_s * 2 ** max(0.0, bound - usual_level) if bound >= 0 else bound_s
            while count < _MAX_AGED and (entry := self._top(heap)) and now - entry.arrived >= level_bound_s:
                heappop(heap)
                entry.is_aged = True
                self._num_aged += 1
                entry.aged_order = self._num_aged
                self._file(entry)
                count += 1
            if not heap:
                del self._by_bound[bound]
        return count

    def check(self) -> None:
        """Assert the invariants. For tests."""
        for entry in self._entries.values():
            assert not entry.is_running
            for heap in (self._by_key, self._by_level, self._by_arrival):
                assert any(item is entry and stay == entry.stay for _, stay, item in heap)
        assert self.first() is next(self.ordered(), None)
        levels = [entry.level for entry in self._entries.values()]
        assert (best := self.best()) is None or best.level == min(levels)
        oldest = min(self._entries.values(), key=lambda entry: entry.number, default=None)
        assert self.oldest() is oldest

    def ordered(self) -> Iterator[Entry]:
        """All, first to run first. Sorts: for where the whole queue is wanted."""
        return iter(sorted(self._entries.values(), key=lambda entry: entry.wait_key))

    def _file(self, entry: Entry) -> None:
        """By its place in the queue now; the one before, if it is in the heap, is behind this."""
        key = (2.0, entry.level, float(not entry.was_running), float(entry.order or entry.number))
        if entry.is_pinned:
            key = (0.0, float(entry.number), 0.0, 0.0)
        elif entry.is_aged:
            key = (1.0, float(not entry.prompt_left), float(entry.aged_order), 0.0)
        entry.wait_key = key
        self._push(self._by_key, key, entry)

    def _push(self, heap: _Heap, key: tuple[float, ...], entry: Entry) -> None:
        heappush(heap, ((*key, float(entry.number)), entry.stay, entry))

    def _top(self, heap: _Heap) -> Entry | None:
        while heap:
            _, stay, entry = heap[0]
            if entry.stay == stay:
                return entry
            heappop(heap)
        return None


def _bound_of(entry: Entry) -> float:
    return entry.level if entry.sequence.outputs else -1.0
