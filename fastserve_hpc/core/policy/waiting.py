"""The requests that wait for a place: who is next, who is best, who is oldest."""

from __future__ import annotations

from collections.abc import Iterator

from fastserve_hpc.core.policy.entry import Entry
from fastserve_hpc.core.policy.entry_heap import EntryHeap


class Waiting:
    """Everything in heaps: no cost grows with the queue."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._by_key = EntryHeap()
        self._num_aged = 0
        self._by_level = EntryHeap()
        self._by_arrival = EntryHeap()

    @property
    def is_empty(self) -> bool:
        return not self._entries

    def put(self, entry: Entry) -> None:
        entry.stay += 1
        self._entries[entry.number] = entry
        self._file(entry)
        self._by_level.push((entry.level, float(not entry.was_running), float(entry.order)), entry)
        self._by_arrival.push((), entry)

    def take_out(self, entry: Entry) -> None:
        entry.stay += 1
        del self._entries[entry.number]

    def first(self) -> Entry | None:
        """The one that gets the next free place: pinned; aged, those without a token first; then by level, those
        replaced first."""
        return self._by_key.top()

    def best(self) -> Entry | None:
        """The one with the best level."""
        return self._by_level.top()

    def oldest(self) -> Entry | None:
        """The first to arrive."""
        return self._by_arrival.top()

    def promote(self, entry: Entry) -> None:
        """It has come of age."""
        entry.is_aged = True
        self._num_aged += 1
        entry.aged_order = self._num_aged
        self._file(entry)

    def check(self) -> None:
        """Assert the invariants. For tests."""
        for entry in self._entries.values():
            assert not entry.is_running
            for heap in (self._by_key, self._by_level, self._by_arrival):
                assert entry in heap
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
        self._by_key.push(key, entry)
