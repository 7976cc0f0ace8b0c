"""Slots are free or held, never both."""

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
    pool.give_back(slots)
    assert pool.take(3) == slots


def test_what_nobody_holds_cannot_be_given_back() -> None:
    pool = BlockPool(4)
    pool.take(2)
    with pytest.raises(ValueError, match=r"slots \[2\]"):
        pool.give_back([1, 2])
    pool.give_back([1])
    with pytest.raises(ValueError, match=r"slots \[1\]"):
        pool.give_back([1])
    pool.check()


def test_a_tier_may_have_no_slots() -> None:
    assert BlockPool(0).take(1) is None
    with pytest.raises(ValueError, match="-1 slots"):
        BlockPool(-1)


class PoolMachine(RuleBasedStateMachine):
    """Against a model that remembers who has each slot."""

    @initialize(num_slots=st.integers(1, 12))
    def start(self, num_slots: int) -> None:
        self.pool = BlockPool(num_slots)
        self.held: list[list[int]] = []

    @rule(count=st.integers(0, 6))
    def take(self, count: int) -> None:
        num_free = self.pool.num_slots - sum(map(len, self.held))
        slots = self.pool.take(count)
        if count > num_free:
            assert slots is None
            return
        assert slots is not None
        assert len(set(slots)) == count
        assert not set(slots) & {slot for table in self.held for slot in table}
        self.held.append(list(slots))

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        if self.held:
            self.pool.give_back(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check()
            assert self.pool.num_held == sum(map(len, self.held))


class LongPoolMachine(PoolMachine):
    """The same for longer."""


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestPoolLong = pytest.mark.slow(pytest.mark.timeout(900)(LongPoolMachine.TestCase))
TestPoolLong.settings = settings(max_examples=2000, stateful_step_count=50, deadline=None)
