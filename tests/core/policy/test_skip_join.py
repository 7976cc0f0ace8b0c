"""Our rules, one by one. That they work together is shown under the scheduler and in the simulator."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from scheduling import request

from fastserve_hpc.config import RULES
from fastserve_hpc.core.cost import CostModel, Costs
from fastserve_hpc.core.policy.sizing import SkipJoinRules
from fastserve_hpc.core.policy.skip_join import SkipJoin
from fastserve_hpc.core.request import Request
from fastserve_hpc.core.sequence import Sequence

COST = CostModel(Costs(fixed_s=0.0, prefill_token_s=0.01, prefill_attention_s=0, decode_sequence_s=0.01, kv_token_s=0))
"""A prompt token costs as much as an output token: 10 ms."""
H, M = 50, 200
"""The priors of the harmonic mean and the mean."""


class Bench:
    """A policy, driven by hand."""

    def __init__(self, max_batch: int = 1, **rules: Any):
        self.policy = SkipJoin(max_batch, COST, SkipJoinRules(**{"oldest_share": 0.0, **rules}))
        self.now = 0.0
        self.count = 0

    def add(self, prompt: int = 1, **fields: Any) -> Sequence:
        plain = {"service_class": "interactive", "session": None, "expected_tokens": None}
        new: Request = replace(request(self.count, prompt, 4096), **{**plain, **fields})
        self.count += 1
        sequence = Sequence(new, self.now)
        self.policy.add(sequence, self.now)
        return sequence

    def prefill(self, sequence: Sequence) -> None:
        self.give(sequence, 1, sequence.num_prompt)

    def give(self, sequence: Sequence, outputs: int, num_tokens: int = 1) -> None:
        for _ in range(outputs):
            sequence.outputs.append(7)
            self.policy.on_progress(sequence, num_tokens, self.now)
            num_tokens = 1

    def finish(self, *lengths: int, hint_factor: float | None = None) -> None:
        for length in lengths:
            hint = None if hint_factor is None else max(1, round(length * hint_factor))
            sequence = self.add(expected_tokens=hint)
            sequence.outputs += [7] * length
            self.policy.remove(sequence, is_complete=True)

    def order(self) -> list[int]:
        ranked = list(self.policy.ranked(self.now))
        assert ranked == sorted(ranked, key=self.policy.order_key)
        self.policy.check()
        return [sequence.request_id for sequence in ranked]

    def level(self, sequence: Sequence) -> float:
        return self.policy._entries[sequence.request_id].level


def level_of(tokens: float) -> int:
    return max(0, math.ceil(math.log2(tokens / 16)))


class TestLevels:
    @pytest.mark.parametrize("prompt", [1, 14, 50, 400, 4000])
    def test_a_request_joins_by_its_prompt_s_cost(self, prompt: int) -> None:
        bench = Bench()
        assert bench.level(bench.add(prompt)) == level_of(math.sqrt((prompt + H) * H))

    def test_without_skip_join_the_prompt_does_not_count(self) -> None:
        bench = Bench(joins_by_prompt=False)
        assert bench.level(bench.add(4000)) == level_of(H)

    @pytest.mark.parametrize("sinks", [True, False])
    def test_once_computed_the_prompt_is_sunk(self, sinks: bool) -> None:
        bench = Bench(sinks_prompt=sinks)
        sequence = bench.add(4000)
        before = bench.level(sequence)
        bench.order()
        bench.policy.on_progress(sequence, 3000, 0.0)
        assert bench.level(sequence) == before
        bench.give(sequence, 1, 1000)
        assert bench.level(sequence) == (level_of(H) if sinks else before)

    def test_a_level_ends_with_its_quantum(self) -> None:
        bench = Bench()
        sequence = bench.add()
        bench.order()
        bench.prefill(sequence)
        levels = []
        for _ in range(300):
            levels.append(bench.level(sequence))
            bench.give(sequence, 1)
        assert levels == [max(level_of(H), level_of(outputs + 1)) for outputs in range(1, 301)]

    def test_answers_that_finished_move_the_usual_level(self) -> None:
        bench = Bench()
        bench.finish(*[8] * 400)
        assert bench.level(bench.add()) == 0

    def test_one_that_is_dropped_teaches_nothing(self) -> None:
        bench = Bench()
        for _ in range(400):
            sequence = bench.add()
            sequence.outputs += [7]
            bench.policy.remove(sequence, is_complete=False)
        assert bench.level(bench.add()) == level_of(H)


class TestPlaces:
    def test_free_places_go_to_the_best_level_in_order_of_arrival(self) -> None:
        bench = Bench(max_batch=3)
        for prompt in (900, 1, 4000, 1, 1):
            bench.add(prompt)
        assert set(bench.order()[:3]) == {1, 3, 4}
        assert bench.order()[3:] == [0, 2]

    def test_decodes_come_before_prompts(self) -> None:
        bench = Bench(max_batch=2)
        long, short = bench.add(4000), bench.add(1)
        bench.order()
        bench.prefill(long)
        bench.give(long, 400)
        assert bench.order() == [long.request_id, short.request_id]

    def ready(self, outputs: int, **rules: Any) -> tuple[Bench, Sequence, Sequence]:
        """One place; a request that has had so many tokens and runs; a new one."""
        bench = Bench(**rules)
        bench.finish(*[H] * 40)
        runner = bench.add()
        bench.order()
        bench.prefill(runner)
        bench.give(runner, outputs - 1)
        return bench, runner, bench.add()

    @pytest.mark.parametrize(("outputs", "is_replaced"), [(10, False), (63, False), (64, True), (500, True)])
    def test_a_much_worse_runner_is_replaced(self, outputs: int, is_replaced: bool) -> None:
        bench, runner, new = self.ready(outputs)
        expected = [new, runner] if is_replaced else [runner, new]
        assert bench.order() == [sequence.request_id for sequence in expected]
        assert bench.policy.num_replaced == is_replaced

    @pytest.mark.parametrize(
        "rules", [{"replaces": False}, {"min_finished": 41}, {"min_gap": 6.0}, {"spared_levels": 9.0}]
    )
    def test_what_forbids_it(self, rules: dict[str, Any]) -> None:
        bench, runner, _ = self.ready(500, **rules)
        assert bench.order()[0] == runner.request_id

    def test_the_replaced_comes_back_before_others_of_its_level(self) -> None:
        bench, runner, new = self.ready(64)
        bench.order()
        assert bench.level(bench.add(100)) == bench.level(runner)
        bench.policy.remove(new, is_complete=False)
        assert bench.order()[0] == runner.request_id

    def test_a_token_in_flight_of_the_replaced_still_counts(self) -> None:
        bench, runner, _ = self.ready(127)
        bench.order()
        before = bench.level(runner)
        bench.give(runner, 1)
        assert bench.level(runner) == before + 1
        bench.order()


class TestNobodyStarves:
    def test_the_oldest_go_first_once_the_backlog_should_be_done(self) -> None:
        bench = Bench(max_batch=1, aging=0.6)
        runner, long, short = bench.add(), bench.add(4000), bench.add()
        bound = 0.6 * 0.01 * (1 + 4000 + 1 + 3 * M)
        assert bench.policy.drain_s() == pytest.approx(bound / 0.6)
        bench.now = bound * 0.99
        assert bench.order() == [runner.request_id, short.request_id, long.request_id]
        bench.now = bound * 1.01
        assert bench.order() == [runner.request_id, long.request_id, short.request_id]
        assert bench.policy.num_aged == 3, "with the one that runs: its prompt is not done"
        assert bench.policy.counters() == {"replaced": 0, "aged": 3, "pinned": 0, "level_2": 2, "level_5": 1}
        assert SkipJoin(1, COST, SkipJoinRules(aging=math.inf)).num_aged == 0

    def test_inside_a_batch_a_prompt_that_others_pass_by_comes_of_age(self) -> None:
        """With places for all nobody waits, but new prompts of better levels are computed first."""
        bench = Bench(max_batch=8, aging=0.6)
        long, short = bench.add(4000), bench.add()
        assert bench.order() == [short.request_id, long.request_id]
        bench.now = 0.7 * bench.policy.drain_s()
        late = bench.add()
        assert bench.order() == [long.request_id, short.request_id, late.request_id]
        bench.prefill(long)
        bench.now *= 100
        bench.order()
        assert not bench.policy._entries[long.request_id].is_aged, "it decodes, and those come first in any case"

    def test_who_leaves_or_moves_is_not_taken_for_one_of_age(self) -> None:
        bench = Bench(max_batch=1, aging=0.6)
        gone, waits, runs = bench.add(), bench.add(300), bench.add(20)
        bench.order()
        for sequence in (gone, runs):
            bench.policy.remove(sequence, is_complete=False)
        bench.now = 1000.0
        assert bench.order() == [waits.request_id]
        assert bench.policy.num_aged == 1

    def test_aging_ends_with_the_prompt(self) -> None:
        bench = Bench(max_batch=1)
        first = bench.add(4000)
        bench.now = 100.0
        bench.add()
        bench.order()
        assert bench.policy._entries[first.request_id].is_running
        bench.prefill(first)
        assert not bench.policy._entries[first.request_id].is_aged

    def test_the_oldest_has_its_share_whatever_comes(self) -> None:
        """New requests all the time, each better than the old one, and no aging: it must still finish."""
        bench = Bench(max_batch=1, oldest_share=0.05, aging=math.inf)
        bench.finish(*[20] * 40)
        old = bench.add()
        bench.order()
        bench.prefill(old)
        bench.give(old, 200)
        work = 0
        while len(old.outputs) < 600:
            bench.add()
            ahead = next(iter(bench.policy.ranked(bench.now)))
            if ahead.outputs:
                bench.give(ahead, 1)
            else:
                bench.prefill(ahead)
            work += 1
            if ahead is not old and len(ahead.outputs) == 20:
                bench.policy.remove(ahead, is_complete=True)
            assert work < 3000
        assert bench.policy._entries[old.request_id].is_pinned
        bench.policy.check()


class TestHints:
    def trusted(self, **rules: Any) -> Bench:
        bench = Bench(**rules)
        bench.finish(*(10 + i * 7 % 400 for i in range(100)), hint_factor=1.0)
        return bench

    def test_a_trusted_hint_decides(self) -> None:
        bench = self.trusted()
        short, long = bench.add(expected_tokens=5), bench.add(expected_tokens=2000)
        assert bench.level(short) == 0
        step = math.log2(1.5)
        expected = math.ceil(math.log(math.sqrt(2001 * 2000) / 16, 1.5)) * step
        assert bench.level(long) == pytest.approx(expected)

    def test_the_longer_the_answer_is_to_be_the_longer_a_request_may_have_to_wait(self) -> None:
        bench = self.trusted(max_batch=1, aging=0.5)
        bench.add()
        hinted, plain = bench.add(expected_tokens=2000), bench.add()
        bench.order()
        bench.now = bench.policy.drain_s()
        assert bench.policy.standing(plain, bench.now).promoted_in_s == 0
        assert bench.policy.standing(hinted, bench.now).promoted_in_s > 5 * bench.now
        bench.order()
        entries = bench.policy._entries
        assert (entries[plain.request_id].is_aged, entries[hinted.request_id].is_aged) == (True, False)

    def test_what_is_left_counts_and_levels_rise(self) -> None:
        bench = self.trusted()
        sequence = bench.add(expected_tokens=400)
        bench.order()
        bench.prefill(sequence)
        levels = []
        for _ in range(398):
            bench.give(sequence, 1)
            levels.append(bench.level(sequence))
        assert levels == sorted(levels, reverse=True)
        assert levels[-1] <= level_of(math.sqrt(400 * 1.5))

    def test_an_answer_longer_than_its_hint_is_treated_like_others(self) -> None:
        bench = self.trusted()
        sequence = bench.add(expected_tokens=20)
        bench.order()
        bench.prefill(sequence)
        bench.give(sequence, 150)
        assert bench.level(sequence) >= level_of(151)

    @pytest.mark.parametrize("kind", ["switched off", "never right"])
    def test_else_the_rules_are_exactly_the_unhinted(self, kind: str) -> None:
        bench = Bench(uses_hints=kind != "switched off")
        if kind == "switched off":
            bench.finish(*range(10, 110), hint_factor=1.0)
        assert bench.level(bench.add(300, expected_tokens=9)) == bench.level(bench.add(300))


class TestClassesAndSessions:
    def test_batch_takes_only_what_is_left(self) -> None:
        bench = Bench(max_batch=1)
        batch = bench.add(service_class="batch")
        assert bench.order() == [batch.request_id]
        interactive = bench.add(4000)
        assert bench.order() == [interactive.request_id, batch.request_id], "at once, whatever has finished"

    def test_a_session_is_served_as_one(self) -> None:
        bench = Bench(max_batch=8)
        many = [bench.add(session="s") for _ in range(4)]
        single = bench.add()
        bench.order()
        for sequence in (*many, single):
            bench.prefill(sequence)
            bench.give(sequence, 30)
        assert bench.level(single) == level_of(H)
        assert bench.level(many[-1]) == level_of(4 * 30)
        assert bench.level(bench.add(session="s")) == level_of(4 * 30)
        for sequence in list(bench.policy.ranked(0.0)):
            bench.policy.remove(sequence, is_complete=False)
        bench.policy.check()
        assert bench.level(bench.add(session="s")) == bench.level(bench.add()), "nobody is left: it begins anew"


def test_a_long_queue_costs_no_more() -> None:
    def seconds(queued: int) -> float:
        bench = Bench(max_batch=16, oldest_share=0.05)
        bench.finish(*[40] * 40)
        for _ in range(queued):
            bench.add(20)
        begin = time.thread_time()
        for i in range(400):
            bench.now = i * 0.01
            for sequence in list(islice(bench.policy.ranked(bench.now), 16)):
                bench.give(sequence, 1, 20 if not sequence.outputs else 1)
        return time.thread_time() - begin

    few = min(seconds(50) for _ in range(3))
    assert min(seconds(10_000) for _ in range(3)) < 3.0 * few


class TestSwitches:
    def test_each_rule_can_be_switched_off(self) -> None:
        rules = SkipJoinRules()
        for name in RULES:
            assert rules.without([name]) != rules
        assert rules.without(()) == rules
        assert rules.without(["aging", "oldest"]).without(["hints"]) == rules.without(["hints", "oldest", "aging"])

    def test_without_classes_batch_requests_are_like_others(self) -> None:
        bench = Bench(max_batch=1, uses_classes=False)
        bench.add(service_class="batch")
        bench.add()
        assert bench.order() == [0, 1]

    def test_without_sessions_each_request_counts_alone(self) -> None:
        bench = Bench(max_batch=2, uses_sessions=False)
        one, other = bench.add(session="s"), bench.add(session="s")
        bench.order()
        bench.prefill(one)
        bench.give(one, 300)
        bench.prefill(other)
        assert bench.level(other) == level_of(H)

    def test_stages_share_the_batch_and_work_side_by_side(self) -> None:
        cost = CostModel(Costs(0.1, 0.005, 0.0, 0.0, 0.0))
        plain, staged = (SkipJoin(8, cost, num_stages=stages) for stages in (1, 2))
        for policy in (plain, staged):
            policy.add(Sequence(request(0, 100, 50), 0.0), 0.0)
        # Each stage holds half of the batch.
        assert plain.drain_s() == pytest.approx(100 * 0.005 + M * 0.1 / 8)
        assert staged.drain_s() == pytest.approx(100 * 0.005 + M * 0.1 / 4)
