"""A heap of requests from which nobody has to be taken out."""

from __future__ import annotations

from heapq import heappop, heappush

from fastserve_hpc.core.policy.entry import Entry


class EntryHeap:
    """By key, then arrival. Those that have moved since are void, and are dropped when they come to the top."""

    def __init__(self) -> None:
        self._items: list[tuple[tuple[float, ...], int, Entry]] = []

    def __contains__(self, entry: Entry) -> bool:
        return any(item is entry and stay == entry.stay for _, stay, item in self._items)

    def push(self, key: tuple[float, ...], entry: Entry) -> None:
        heappush(self._items, ((*key, float(entry.number)), entry.stay, entry))

    def top(self) -> Entry | None:
        while self._items:
            _, stay, entry = self._items[0]
            if entry.stay == stay:
                return entry
            heappop(self._items)
        return None

    def pop(self) -> None:
        """Drop the top."""
        heappop(self._items)
