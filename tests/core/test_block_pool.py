"""Slots are free, held or retiring, never two of these."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fastserve_hpc.core.block_pool import BlockPool


def taken(pool: BlockPool, count: int) -> tuple[int, ...]:
    slots = pool.take(count)
    assert slots is not None
    return slots


def test_take_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    assert pool.take(3) == (0, 1, 2)
    assert pool.take(2) is None
    assert pool.num_free == 1
    assert pool.take(1) == (3,)
    assert pool.take(0) == ()


def test_the_slots_freed_last_are_taken_first() -> None:
    pool = BlockPool(8)
    slots = taken(pool, 3)
    pool.give_back(slots, after_plan=0)
    assert pool.take(3) == slots


def test_a_slot_is_not_free_while_a_plan_in_flight_uses_it() -> None:
    pool = BlockPool(2)
    pool.give_back(taken(pool, 2), after_plan=3)
    pool.plan_done(2)
    assert (pool.num_free, pool.num_retiring, pool.take(1)) == (0, 2, None)
    pool.plan_done(3)
    assert (pool.num_free, pool.num_retiring) == (2, 0)


def test_a_slot_whose_last_plan_is_done_is_free_at_once() -> None:
    pool = BlockPool(2)
    slots = taken(pool, 2)
    pool.plan_done(3)
    pool.give_back(slots, after_plan=3)
    assert pool.num_free == 2


def test_what_nobody_holds_cannot_be_given_back() -> None:
    pool = BlockPool(4)
    pool.take(2)
    with pytest.raises(ValueError, match=r"slots \[2\]"):
        pool.give_back([1, 2], after_plan=0)
    pool.give_back([1], after_plan=0)
    with pytest.raises(ValueError, match=r"slots \[1\]"):
        pool.give_back([1], after_plan=0)
    pool.check()


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="0 slots"):
        BlockPool(0)


class PoolMachine(RuleBasedStateMachine):
    """Against a model that remembers, for every slot, who has it and until when."""

    @initialize(num_slots=st.integers(1, 12))
    def start(self, num_slots: int) -> None:
        self.pool = BlockPool(num_slots)
        self.held: list[list[int]] = []
        self.retiring: dict[int, int] = {}
        self.last_done = 0

    @rule(count=st.integers(0, 6))
    def take(self, count: int) -> None:
        num_free = self.pool.num_slots - sum(map(len, self.held)) - len(self.retiring)
        slots = self.pool.take(count)
        if count > num_free:
            assert slots is None
            return
        assert slots is not None
        assert len(set(slots)) == count
        assert not set(slots) & {slot for table in self.held for slot in table}
        assert not set(slots) & self.retiring.keys()
        self.held.append(list(slots))

    @rule(data=st.data(), ahead=st.integers(-2, 3))
    def give_back(self, data: st.DataObject, ahead: int) -> None:
        if self.held:
            table = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            after_plan = max(0, self.last_done + ahead)
            self.pool.give_back(table, after_plan)
            if after_plan > self.last_done:
                self.retiring |= dict.fromkeys(table, after_plan)

    @rule(plans=st.integers(1, 2))
    def plan_done(self, plans: int) -> None:
        self.last_done += plans
        self.pool.plan_done(self.last_done)
        self.retiring = {slot: after for slot, after in self.retiring.items() if after > self.last_done}

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check()
            assert self.pool.num_held == sum(map(len, self.held))
            assert self.pool.num_retiring == len(self.retiring)
            assert self.pool.num_free == self.pool.num_slots - self.pool.num_held - self.pool.num_retiring


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
