"""Block tables grow as positions are needed and give every block back."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fastserve_hpc.core.kv_manager import KvManager


def test_a_table_has_a_block_for_every_position() -> None:
    kv = KvManager(num_blocks=8, block_size=4)
    assert kv.try_extend(1, 4) == (0,)
    assert kv.try_extend(1, 4) == ()
    assert kv.try_extend(1, 5) == (1,)
    assert kv.try_extend(1, 13) == (2, 3)
    assert kv.table(1) == (0, 1, 2, 3)
    assert (kv.num_used, kv.num_free, kv.num_total) == (4, 4, 8)


def test_what_does_not_fit_changes_nothing() -> None:
    kv = KvManager(num_blocks=3, block_size=4)
    kv.try_extend(1, 8)
    assert kv.try_extend(2, 5) is None
    assert kv.try_extend(1, 17) is None
    assert (kv.table(1), kv.table(2), kv.holders(), kv.num_free) == ((0, 1), (), [1], 1)
    kv.check()


def test_freed_blocks_wait_for_their_last_plan() -> None:
    kv = KvManager(num_blocks=2, block_size=4)
    kv.try_extend(1, 8)
    kv.free(1, last_plan_id=2)
    assert (kv.num_used, kv.num_retiring, kv.try_extend(2, 1)) == (2, 2, None)
    kv.plan_done(1)
    assert kv.try_extend(2, 1) is None
    kv.plan_done(2)
    assert kv.try_extend(2, 8) is not None


def test_freeing_what_holds_nothing_is_harmless() -> None:
    kv = KvManager(num_blocks=2, block_size=4)
    kv.free(7, last_plan_id=1)
    assert kv.num_free == 2


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (160, 10)])
def test_blocks_for(num_tokens: int, blocks: int) -> None:
    assert KvManager(num_blocks=4, block_size=16).blocks_for(num_tokens) == blocks


def test_senseless_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="blocks of 0 tokens"):
        KvManager(num_blocks=4, block_size=0)


class KvMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 16), block_size=st.sampled_from([1, 3, 16]))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.kv = KvManager(num_blocks, block_size)
        self.tables: dict[int, tuple[int, ...]] = {}
        self.plan_id = 0

    @rule(request_id=st.integers(0, 5), num_tokens=st.integers(1, 60))
    def extend(self, request_id: int, num_tokens: int) -> None:
        old = self.tables.get(request_id, ())
        missing = max(0, self.kv.blocks_for(num_tokens) - len(old))
        num_free = self.kv.num_free
        slots = self.kv.try_extend(request_id, num_tokens)
        assert (slots is None) == (missing > num_free)
        if slots:
            assert len(slots) == missing
            self.tables[request_id] = old + slots

    @rule(request_id=st.integers(0, 5), ahead=st.integers(0, 2))
    def free(self, request_id: int, ahead: int) -> None:
        self.kv.free(request_id, self.plan_id + ahead)
        self.tables.pop(request_id, None)

    @rule()
    def plan_done(self) -> None:
        self.plan_id += 1
        self.kv.plan_done(self.plan_id)

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "kv"):
            self.kv.check()
            assert sorted(self.kv.holders()) == sorted(self.tables)
            assert all(self.kv.table(request_id) == table for request_id, table in self.tables.items())
            assert self.kv.num_used == sum(map(len, self.tables.values())) + self.kv.num_retiring

    def teardown(self) -> None:
        if hasattr(self, "kv"):
            for request_id in list(self.tables):
                self.kv.free(request_id, self.plan_id)
            self.kv.plan_done(self.plan_id + 2)
            assert self.kv.num_used == 0


TestKv = KvMachine.TestCase
TestKv.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
