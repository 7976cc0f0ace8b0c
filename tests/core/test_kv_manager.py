"""Whose KV lies where: admission, parking in both tiers, the prefix cache, and the laws that hold after every step."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduling import request

from fastserve_hpc.core.cost import Costs
from fastserve_hpc.core.kv_manager import KvManager
from fastserve_hpc.core.kv_policy import KV_POLICIES, CopyCosts
from fastserve_hpc.core.plan import BlockCopy
from fastserve_hpc.core.sequence import Sequence

PROACTIVE, REACTIVE, RECOMPUTE = (KV_POLICIES[name] for name in ("proactive", "reactive", "recompute"))


def sequence(request_id: int = 1, prompt_len: int = 8, shared: int = 0, **sampling: object) -> Sequence:
    return Sequence(request(request_id, prompt_len, 16, shared, **sampling), 0.0)


class Driver:
    """Does what packing and ranks do: plans one after the other, their results at once, copies when told."""

    def __init__(self, num_blocks: int = 8, num_host: int = 8, block_size: int = 4, **settings: object):
        self.kv = KvManager(num_blocks, block_size, num_host, **settings)  # type: ignore[arg-type]
        self.plan_id = 1
        self.copies: list[BlockCopy] = []

    def enter(self, seq: Sequence) -> int | None:
        """Positions that the sequence need not compute; None if it does not fit."""
        needed = self.kv.begin(seq, self.plan_id)
        assert needed is not None
        if self.kv.num_free < needed:
            self.kv.cancel(seq)
            self.kv.check()
            return None
        seq.num_planned = self.kv.complete(seq)
        self.copies += self.kv.take_copies()
        self.kv.check()
        return seq.num_planned

    def compute(self, seq: Sequence, num_tokens: int | None = None) -> tuple[int, ...]:
        """A plan of this one slice, up to the known tokens or so many; its table."""
        table = self.kv.resume(seq)
        end = min(seq.num_tokens, seq.num_planned + (num_tokens or seq.num_tokens))
        self.kv.note_prompt(seq, seq.num_planned, end, self.plan_id)
        seq.num_planned, seq.last_plan_id = end, self.plan_id
        self.next_plan()
        return table

    def run(self, seq: Sequence) -> int:
        """Admit it, and compute all that is known."""
        covered = self.enter(seq)
        assert covered is not None
        self.compute(seq)
        return covered

    def next_plan(self) -> None:
        self.kv.plan_done(self.plan_id)
        self.plan_id += 1
        self.kv.check()

    def park(self, seq: Sequence, costs: Costs | None = None) -> list[BlockCopy]:
        self.kv.park(seq, costs)
        self.kv.check()
        new = list(self.kv.take_copies())
        self.copies += new
        return new

    def copied(self) -> None:
        self.kv.acknowledge(len(self.copies))
        self.kv.check()


def answered(seq: Sequence, num_outputs: int) -> None:
    seq.outputs += range(num_outputs)
    seq.num_tokens += num_outputs


class TestTables:
    def test_a_table_has_a_block_for_every_position(self) -> None:
        driver, seq = Driver(), sequence(prompt_len=5)
        assert driver.enter(seq) == 0
        assert driver.kv.table(1) == (0, 1)
        assert driver.kv.try_extend(1, 8) == ()
        assert driver.kv.try_extend(1, 13) == (2, 3)
        assert driver.kv.table(1) == (0, 1, 2, 3)
        assert (driver.kv.num_used, driver.kv.num_free, driver.kv.num_total) == (4, 4, 8)

    def test_what_does_not_fit_changes_nothing(self) -> None:
        driver, seq = Driver(num_blocks=3), sequence(prompt_len=8)
        driver.enter(seq)
        assert driver.enter(sequence(2)) is None
        assert driver.kv.try_extend(1, 17) is None
        assert (driver.kv.table(1), driver.kv.residents(), driver.kv.num_free) == ((0, 1), [1], 1)

    def test_freed_blocks_wait_for_their_last_plan(self) -> None:
        driver, seq = Driver(num_blocks=2), sequence(prompt_len=8)
        driver.enter(seq)
        seq.num_planned, seq.last_plan_id = 8, 2
        driver.kv.free(seq)
        assert (driver.kv.num_used, driver.kv.num_retiring) == (2, 2)
        driver.kv.plan_done(1)
        assert driver.kv.num_free == 0
        driver.kv.plan_done(2)
        assert driver.kv.num_free == 2

    def test_freeing_what_holds_nothing_is_harmless(self) -> None:
        driver = Driver()
        driver.kv.free(sequence())
        assert driver.kv.num_free == 8

    @pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (160, 10)])
    def test_blocks_for(self, num_tokens: int, blocks: int) -> None:
        assert KvManager(num_blocks=4, block_size=16).blocks_for(num_tokens) == blocks

    @pytest.mark.parametrize(("sizes", "message"), [((4, 0), "blocks of 0 tokens"), ((0, 4), "device tier of 0")])
    def test_senseless_sizes_are_refused(self, sizes: tuple[int, int], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            KvManager(*sizes)


class TestParking:
    def test_recompute_gives_the_blocks_up(self) -> None:
        driver, seq = Driver(policy=RECOMPUTE), sequence(prompt_len=10)
        driver.run(seq)
        assert driver.park(seq) == []
        assert (driver.kv.num_used, driver.kv.parked()) == (0, [])
        assert driver.enter(seq) == 0
        assert driver.kv.counters.recomputed_tokens == 10

    def test_offloaded_blocks_are_free_once_all_ranks_have_copied_them(self) -> None:
        driver, seq = Driver(num_blocks=3, policy=REACTIVE), sequence(prompt_len=10)
        driver.run(seq)
        copies = driver.park(seq)
        assert [(c.copy_id, c.device_slot, c.to_device) for c in copies] == [
            (1, 0, False),
            (2, 1, False),
            (3, 2, False),
        ]
        assert (driver.kv.num_free, driver.kv.num_retiring, driver.kv.num_host_used) == (0, 3, 3)
        driver.kv.acknowledge(2)
        assert driver.kv.num_free == 2
        driver.kv.acknowledge(3)
        assert (driver.kv.num_free, driver.kv.num_host_used) == (3, 3)

    def test_an_offloaded_sequence_comes_back_with_all_it_had(self) -> None:
        driver, seq, other = Driver(num_blocks=3, policy=REACTIVE), sequence(prompt_len=10), sequence(2, 12)
        driver.run(seq)
        driver.park(seq)
        driver.copied()
        driver.run(other)
        driver.kv.free(other)
        assert driver.enter(seq) == 10
        uploads = driver.copies[-3:]
        assert [(c.host_slot, c.to_device) for c in uploads] == [(0, True), (1, True), (2, True)]
        assert [c.device_slot for c in uploads] == list(driver.kv.table(1))
        assert driver.kv.upload_of(1) == uploads[-1].copy_id
        driver.copied()
        assert driver.kv.upload_of(1) == 0

    def test_what_nobody_has_taken_needs_no_copy(self) -> None:
        driver, seq = Driver(policy=REACTIVE), sequence(prompt_len=10)
        driver.run(seq)
        driver.park(seq)
        assert driver.enter(seq) == 10
        assert driver.kv.num_uploaded == 0

    def test_the_last_block_is_copied_again_once_it_has_changed(self) -> None:
        driver, seq = Driver(policy=REACTIVE), sequence(prompt_len=10)
        driver.run(seq)
        driver.park(seq)
        driver.copied()
        answered(seq, 1)
        driver.enter(seq)
        driver.compute(seq)
        assert [c.device_slot for c in driver.park(seq)] == [2]

    def test_a_copy_that_is_void_keeps_its_slot_until_it_is_done(self) -> None:
        driver, seq = Driver(num_host=3, policy=REACTIVE), sequence(prompt_len=10)
        driver.run(seq)
        driver.park(seq)
        answered(seq, 1)
        driver.enter(seq)
        driver.compute(seq)
        assert driver.kv.num_host_used == 3, "the copies are in flight"
        driver.copied()
        assert driver.kv.num_host_used == 0

    def test_a_full_host_keeps_the_beginning(self) -> None:
        driver, seq, other = Driver(num_blocks=4, num_host=2, policy=REACTIVE), sequence(prompt_len=14), sequence(2, 16)
        driver.run(seq)
        assert len(driver.park(seq)) == 2
        driver.copied()
        assert driver.kv.counters.host_full == 1
        driver.run(other)
        driver.kv.free(other)
        assert driver.enter(seq) == 8
        assert driver.kv.counters.recomputed_tokens == 6

    def test_what_is_cheaper_to_compute_is_not_copied(self) -> None:
        slow = CopyCosts(to_host_s=1.0, to_device_s=1.0)
        driver, seq = Driver(policy=REACTIVE, copy_costs=slow), sequence(prompt_len=10)
        driver.run(seq)
        assert driver.park(seq, Costs(prefill_token_s=0.1)) == []
        driver.enter(seq)
        driver.compute(seq)
        assert len(driver.park(seq, Costs(prefill_token_s=1.0))) == 3

    def test_full_blocks_are_mirrored_early_within_bounds(self) -> None:
        driver, seq = Driver(policy=PROACTIVE), sequence(prompt_len=14)
        driver.run(seq)
        assert [driver.kv.mirror(seq, most=2) for _ in range(3)] == [2, 1, 0]
        driver.copies += driver.kv.take_copies()
        driver.copied()
        assert [c.device_slot for c in driver.park(seq)] == [3], "only the last block has to be copied"
        assert driver.kv.num_free == 7

    def test_mirrors_make_way_for_what_must_be_kept(self) -> None:
        driver, one, two = Driver(num_host=2, policy=PROACTIVE), sequence(1, 8), sequence(2, 8)
        driver.run(one)
        driver.run(two)
        assert driver.kv.mirror(one, most=9) == 2
        driver.copies += driver.kv.take_copies()
        driver.copied()
        assert driver.kv.num_host_used == 0
        assert driver.kv.mirror(two, most=9) == 0
        assert len(driver.park(two)) == 2


class TestPrefixes:
    def test_a_prompt_goes_on_where_another_began_alike(self) -> None:
        driver = Driver(salt=b"salt")
        one, two = sequence(1, 14, shared=9), sequence(2, 12, shared=9)
        assert (driver.run(one), driver.run(two)) == (0, 8)
        assert driver.kv.table(1)[:2] == driver.kv.table(2)[:2]
        assert driver.kv.counters.prefix_tokens == 8

    def test_the_last_token_is_always_computed(self) -> None:
        driver = Driver(salt=b"salt")
        assert driver.run(sequence(1, 8, shared=8)) == 0
        assert driver.run(sequence(2, 8, shared=8)) == 4

    def test_what_has_ended_stays_until_the_blocks_are_needed(self) -> None:
        driver = Driver(num_blocks=4, salt=b"salt")
        one = sequence(1, 9, shared=9)
        driver.run(one)
        driver.kv.free(one)
        assert driver.kv.num_free == 4
        two = sequence(2, 10, shared=9)
        assert driver.run(two) == 8
        driver.kv.free(two)
        driver.run(three := sequence(3, 16))
        driver.kv.free(three)
        assert driver.run(sequence(4, 10, shared=9)) == 0

    def test_the_oldest_go_first(self) -> None:
        driver = Driver(num_blocks=6, salt=b"salt")
        for request_id, shared in ((1, 0), (2, 0), (3, 0)):
            driver.run(one := sequence(request_id, 8, shared))
            driver.kv.free(one)
        again = Sequence(request(1, 9), 0.0)
        assert driver.run(again) == 8
        driver.kv.free(again)
        driver.run(four := sequence(4, 9))
        driver.kv.free(four)
        assert driver.run(Sequence(request(1, 9), 0.0)) == 8, "used last"

    def test_an_answer_can_be_gone_on_with(self) -> None:
        driver = Driver(salt=b"salt")
        one = sequence(1, 6)
        driver.enter(one)
        driver.compute(one)
        answered(one, 4)
        driver.kv.try_extend(1, 10)
        driver.compute(one)
        driver.kv.free(one)
        chat = Sequence(request(2), 0.0)
        prompt = (*one.request.prompt, *one.outputs, 1)
        chat.request, chat.num_prompt, chat.num_tokens = request(2, 11), 11, 11
        object.__setattr__(chat.request, "prompt", prompt)
        assert driver.run(chat) == 8

    def test_a_request_waits_while_its_prefix_is_being_computed(self) -> None:
        driver = Driver(salt=b"salt")
        one, two = sequence(1, 13, shared=12), sequence(2, 14, shared=12)
        driver.enter(one)
        one.last_plan_id = driver.plan_id
        assert driver.kv.begin(two, driver.plan_id) is None
        driver.compute(one, 6)
        one.last_plan_id = driver.plan_id
        assert driver.kv.begin(two, driver.plan_id) is None, "the next chunk is in this plan"
        driver.compute(one)
        assert driver.run(two) == 12

    def test_it_does_not_wait_for_one_that_does_not_run(self) -> None:
        driver = Driver(salt=b"salt")
        one, two = sequence(1, 13, shared=12), sequence(2, 14, shared=12)
        driver.enter(one)
        driver.compute(one, 6)
        driver.next_plan()
        assert driver.enter(two) == 4

    def test_prompt_logprobs_need_all_positions_that_they_are_wanted_of(self) -> None:
        driver = Driver(num_blocks=40, salt=b"salt")
        driver.run(sequence(1, 13, shared=13))
        assert driver.run(sequence(2, 13, shared=13, prompt_logprobs=0)) == 0
        assert driver.run(sequence(3, 13, shared=13, prompt_logprobs=0, prompt_logprobs_from=7)) == 4
        assert driver.run(sequence(4, 13, shared=13, prompt_logprobs=0, prompt_logprobs_from=8)) == 8
        assert driver.run(sequence(5, 13, shared=13, prompt_logprobs_from=0)) == 12

    def test_one_that_opts_out_neither_gives_nor_takes(self) -> None:
        driver = Driver(salt=b"salt")
        assert driver.run(sequence(1, 9, shared=9, cache_prefix=False)) == 0
        assert driver.run(sequence(2, 9, shared=9)) == 0
        assert driver.kv.table(1)[:1] != driver.kv.table(2)[:1]
        driver.kv = Driver(salt=b"salt").kv
        driver.plan_id = 1
        driver.run(sequence(1, 9, shared=9))
        assert driver.run(sequence(2, 9, shared=9, cache_prefix=False)) == 0

    def test_without_a_salt_there_is_no_cache(self) -> None:
        driver = Driver()
        driver.run(sequence(1, 9, shared=9))
        assert driver.run(sequence(2, 9, shared=9)) == 0

    def test_what_is_no_good_is_shared_no_more(self) -> None:
        driver = Driver(salt=b"salt")
        one, two = sequence(1, 9, shared=8), sequence(2, 10, shared=8)
        driver.run(one)
        driver.run(two)
        assert driver.kv.condemn(one) == [2]
        driver.kv.free(one)
        driver.kv.discard(two)
        driver.kv.check()
        assert driver.run(sequence(3, 9, shared=8)) == 0

    def test_the_host_tier_is_part_of_the_cache(self) -> None:
        driver = Driver(num_blocks=3, salt=b"salt", policy=REACTIVE)
        one = sequence(1, 9, shared=8)
        driver.run(one)
        driver.park(one)
        driver.copied()
        driver.run(two := sequence(2, 12))
        driver.kv.free(two)
        driver.kv.free(one)
        assert driver.run(sequence(3, 9, shared=8)) == 8
        assert driver.kv.num_uploaded == 2


class KvMachine(RuleBasedStateMachine):
    """Sequences come, compute, are parked, come back and leave; copies are done late."""

    @initialize(
        num_blocks=st.integers(2, 16),
        num_host=st.sampled_from([0, 2, 20]),
        policy=st.sampled_from([PROACTIVE, REACTIVE, RECOMPUTE]),
        salt=st.sampled_from([None, b"salt"]),
    )
    def start(self, **settings: object) -> None:
        self.driver = Driver(block_size=2, **settings)  # type: ignore[arg-type]
        self.live: dict[int, Sequence] = {}
        self.num_acked = self.num_added = 0

    @rule(prompt_len=st.integers(1, 12), shared=st.sampled_from([0, 5, 12]))
    def add(self, prompt_len: int, shared: int) -> None:
        self.num_added += 1
        self.live[self.num_added] = sequence(self.num_added, prompt_len, shared)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), chunk=st.sampled_from([None, 1, 3]))
    def compute(self, data: st.DataObject, chunk: int | None) -> None:
        """Bring it in if it is not there and fits; a slice once its upload is done."""
        driver, seq = self.driver, self._pick(data)
        if seq.request_id not in driver.kv.residents():
            needed = driver.kv.blocks_for(seq.num_tokens)
            if needed > driver.kv.num_total or driver.enter(seq) is None:
                return
        if seq.num_planned == seq.num_tokens:
            answered(seq, 1)
        if driver.kv.upload_of(seq.request_id) or driver.kv.try_extend(seq.request_id, seq.num_tokens) is None:
            return
        driver.compute(seq, chunk)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def park(self, data: st.DataObject) -> None:
        seq = self._pick(data)
        if seq.request_id in self.driver.kv.residents():
            self.driver.park(seq)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), most=st.integers(1, 4))
    def mirror(self, data: st.DataObject, most: int) -> None:
        seq = self._pick(data)
        if seq.request_id in self.driver.kv.residents():
            self.driver.kv.mirror(seq, most)
            self.driver.copies += self.driver.kv.take_copies()

    @precondition(lambda self: self.live)
    @rule(data=st.data(), how=st.sampled_from(["free", "free", "discard", "condemn"]))
    def leave(self, data: st.DataObject, how: str) -> None:
        seq, kv = self._pick(data), self.driver.kv
        if how == "discard":
            kv.discard(seq)
            seq.num_planned = 0
            return
        for sharer in kv.condemn(seq) if how == "condemn" else ():
            kv.discard(self.live[sharer])
            self.live[sharer].num_planned = 0
        kv.free(seq)
        del self.live[seq.request_id]

    @rule(count=st.integers(1, 5))
    def acknowledge(self, count: int) -> None:
        self.num_acked = min(len(self.driver.copies), self.num_acked + count)
        self.driver.kv.acknowledge(self.num_acked)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "driver"):
            self.driver.kv.check()
            for seq in self.live.values():
                table = self.driver.kv.table(seq.request_id)
                assert seq.request_id not in self.driver.kv.residents() or min(table) >= 0

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            for seq in self.live.values():
                self.driver.kv.free(seq)
            self.driver.copied()
            assert self.driver.kv.num_used == self.driver.kv.num_host_used == 0

    def _pick(self, data: st.DataObject) -> Sequence:
        return self.live[data.draw(st.sampled_from(sorted(self.live)))]


class LongKvMachine(KvMachine):
    """The same for longer."""


TestKv = KvMachine.TestCase
TestKv.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestKvLong = pytest.mark.slow(pytest.mark.timeout(900)(LongKvMachine.TestCase))
TestKvLong.settings = settings(max_examples=2000, stateful_step_count=50, deadline=None)
