"""The requests that have a place in the batch: who is first, who has to leave."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

from fastserve_hpc.core.policy.entry import Entry
from fastserve_hpc.core.policy.levels import Levels
from fastserve_hpc.core.sequence import Sequence

_MAX_VICTIMS = 8
"""Running requests, from the worst, that are looked at for one to replace."""
_PINNED = -2.0
"""The place of those whom nobody may replace."""
_AGED = -1.0
"""The place of those that have waited too long, until their prompt is done."""


class Running:
    """Those that decode come before those whose prompt is not done, each by level and entry."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._decoding = Levels()
        self._prefilling = Levels()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self._decoding, self._prefilling)

    def put(self, entry: Entry, order: int) -> None:
        """To the tail of its level. `order` counts entries into queues."""
        entry.stay += 1
        entry.is_running, entry.order = True, order
        entry.is_prefilling = entry.prompt_left > 0
        entry.place = entry.level
        if entry.is_pinned:
            entry.place = _PINNED
        elif entry.is_aged and entry.is_prefilling:
            entry.place = _AGED
        self._entries[entry.sequence.request_id] = entry
        self._levels_of(entry).put(entry.place, entry.sequence)

    def take_out(self, entry: Entry) -> None:
        entry.stay += 1
        entry.is_running = False
        del self._entries[entry.sequence.request_id]
        self._levels_of(entry).take_out(entry.place, entry.sequence)

    def promote(self, entry: Entry, order: int) -> None:
        """It has come of age: its prompt comes before those of others."""
        self.take_out(entry)
        entry.is_aged = True
        self.put(entry, order)

    def last(self) -> Entry | None:
        """The one with the worst level; None where nobody may replace it."""
        lasts = [last for levels in (self._decoding, self._prefilling) if (last := levels.last()) is not None]
        entries = [self._entries[last.request_id] for last in lasts]
        worst = max(entries, key=lambda entry: entry.place, default=None)
        return None if worst is None or worst.is_pinned else worst

    def from_last(self) -> Iterator[Entry]:
        """The first few to leave."""
        for sequence in islice(chain(reversed(self._prefilling), reversed(self._decoding)), _MAX_VICTIMS):
            yield self._entries[sequence.request_id]

    def _levels_of(self, entry: Entry) -> Levels:
        return self._prefilling if entry.is_prefilling else self._decoding

    def check(self) -> None:
        """Assert that each is filed once."""
        assert sorted(sequence.request_id for sequence in self) == sorted(self._entries)
        assert all(entry.is_running for entry in self._entries.values())
