"""The slots of one tier of the KV cache: which are free, held, or retiring."""

from __future__ import annotations

from collections.abc import Sequence


class BlockPool:
    """Hands out slots 0 .. num_slots - 1.

    A slot is *free*, *held*, or *retiring*: given back, but plans in flight still use it. It is free
    again once the last of these is done. Plans are done in the order of their ids.
    """

    def __init__(self, num_slots: int):
        if num_slots < 1:
            raise ValueError(f"a pool of {num_slots} slots: at least 1 is needed")
        self.num_slots = num_slots
        self._free = list(range(num_slots))[::-1]
        self._held: set[int] = set()
        self._retiring: dict[int, list[int]] = {}
        self._last_done = 0
        self.num_retiring = 0

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

    def give_back(self, slots: Sequence[int], after_plan: int) -> None:
        """Let go of held slots, whose last use is in plan `after_plan` (0: they were never used)."""
        if not self._held.issuperset(slots):
            raise ValueError(f"slots {sorted(set(slots) - self._held)} are given back, but nobody holds them")
        self._held.difference_update(slots)
        if after_plan <= self._last_done:
            self._free.extend(reversed(slots))
            return
        self._retiring.setdefault(after_plan, []).extend(slots)
        self.num_retiring += len(slots)

    def plan_done(self, plan_id: int) -> None:
        """Free what retired with this plan and those before it."""
        self._last_done = plan_id
        for after_plan in [after for after in self._retiring if after <= plan_id]:
            slots = self._retiring.pop(after_plan)
            self.num_retiring -= len(slots)
            self._free.extend(reversed(slots))

    def check(self) -> None:
        """Assert that every slot is in exactly one place."""
        retiring = [slot for slots in self._retiring.values() for slot in slots]
        assert len(retiring) == self.num_retiring
        assert sorted([*self._free, *self._held, *retiring]) == list(range(self.num_slots))
        assert all(after_plan > self._last_done for after_plan in self._retiring)
