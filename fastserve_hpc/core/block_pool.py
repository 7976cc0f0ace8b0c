"""The slots of one tier of the KV cache: which are free, which are held."""

from __future__ import annotations

from collections.abc import Sequence


class BlockPool:
    """Hands out slots 0 .. num_slots - 1. A slot comes back once nothing uses it any more (see `BlockStore`)."""

    def __init__(self, num_slots: int):
        if num_slots < 0:
            raise ValueError(f"a pool of {num_slots} slots")
        self.num_slots = num_slots
        self._free = list(range(num_slots))[::-1]
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        """Slots that `take` can hand out now."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def take(self, count: int) -> tuple[int, ...] | None:
        """So many slots, the last one freed first (it may still be in a cache); None if there are not enough."""
        if count > len(self._free):
            return None
        slots = tuple(self._free.pop() for _ in range(count))
        self._held.update(slots)
        return slots

    def give_back(self, slots: Sequence[int]) -> None:
        """Let go of held slots."""
        if not self._held.issuperset(slots):
            raise ValueError(f"slots {sorted(set(slots) - self._held)} are given back, but nobody holds them")
        self._held.difference_update(slots)
        self._free.extend(reversed(slots))

    def check(self) -> None:
        """Assert that every slot is in exactly one place."""
        assert sorted([*self._free, *self._held]) == list(range(self.num_slots))
