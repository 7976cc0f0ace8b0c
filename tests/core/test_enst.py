"""Estimated next scheduled time: the paper's formula, and what the policies tell of themselves."""

from __future__ import annotations

import math

import pytest
from scheduling import Ranks, request

from fastserve_hpc.core.cost import CostModel
from fastserve_hpc.core.enst import Leveled, Standing, by_next_run
from fastserve_hpc.core.policy import POLICIES, make_policy
from fastserve_hpc.core.policy.by_class import ByClass
from fastserve_hpc.core.policy.mlfq import PaperSkipJoin
from fastserve_hpc.core.sequence import Sequence


class Levels:
    """Levels 0, 1, 2, ... by id, with quanta of 1, 2, 4, ... seconds; some are promoted."""

    def __init__(self, promoted_in_s: dict[int, float] | None = None):
        self._promoted = promoted_in_s or {}

    def standing(self, sequence: Sequence, now: float) -> Standing:  # noqa: ARG002
        level = sequence.request_id // 10
        return Standing(2.0**level, self._promoted.get(sequence.request_id, math.inf))


def sequences(*request_ids: int) -> list[Sequence]:
    return [Sequence(request(i), 0.0) for i in request_ids]


def ids(ordered: list[Sequence]) -> list[int]:
    return [sequence.request_id for sequence in ordered]


def test_lower_levels_run_later_and_those_alike_stay_in_order() -> None:
    assert ids(by_next_run(Levels(), sequences(21, 10, 20, 11), sequences(1), 4, 0.0)) == [10, 11, 21, 20]


@pytest.mark.parametrize(("promoted_in_s", "first"), [(2.9, 20), (3.1, 10)])
def test_a_promotion_that_is_sooner_counts(promoted_in_s: float, first: int) -> None:
    """Before level 1 comes two of level 0 have 1 s each to go, two at a time; before level 2, 3 s and once 2 s."""
    ordered = by_next_run(Levels({20: promoted_in_s - 2}), sequences(10, 20), sequences(0, 1), 2, 0.0)
    assert ids(ordered)[0] == first


@pytest.mark.parametrize("name", ["mlfq", "skip-join-paper", "skip-join"])
def test_policies_of_levels_tell_where_a_sequence_stands(name: str) -> None:
    policy = make_policy(name, max_batch=4, cost=CostModel())
    assert isinstance(policy, Leveled)
    short, long = Sequence(request(1, 4), 0.0), Sequence(request(2, 4000), 0.0)
    for sequence in (short, long):
        policy.add(sequence, 0.0)
    standings = [policy.standing(sequence, 1.0) for sequence in (short, long)]
    assert standings[0].quantum_s == standings[1].quantum_s if name == "mlfq" else standings[0] < standings[1]
    assert all(standing.promoted_in_s > 0 for standing in standings)


def test_the_wait_for_a_promotion_is_counted() -> None:
    policy, sequence = PaperSkipJoin(CostModel(), starvation_bound_s=5.0), Sequence(request(1), 0.0)
    policy.add(sequence, 10.0)
    assert [policy.standing(sequence, now).promoted_in_s for now in (10.0, 12.0, 99.0)] == [5.0, 3.0, 0.0]


def test_class_batch_is_below_all_levels() -> None:
    policy = ByClass(lambda: make_policy("fcfs", max_batch=4, cost=CostModel()))
    interactive, batch = sequences(3, 4)  # 4 is of class batch
    for sequence in (interactive, batch):
        policy.add(sequence, 0.0)
    assert policy.standing(interactive, 0.0) < policy.standing(batch, 0.0)


def test_policies_without_levels_keep_their_order() -> None:
    assert [name for name in POLICIES if isinstance(make_policy(name, max_batch=1, cost=CostModel()), Leveled)] == [
        "mlfq",
        "skip-join-paper",
        "skip-join",
    ]


class TestAheadOfNeed:
    def test_those_that_do_not_run_leave_before_blocks_are_short(self) -> None:
        ranks = Ranks(
            num_blocks=32, block_size=4, max_batch=2, num_host_blocks=64, kv_policy="proactive", policy="last come"
        )
        for request_id in range(8):
            ranks.add(request(request_id, prompt_len=20, max_tokens=30, stop_token_ids=()))
            for _ in range(4):
                ranks.schedule()
                ranks.land()
                ranks.copy()
        ranks.run()
        kv = ranks.scheduler.kv
        assert kv.num_offloaded > 0
        assert kv.counters.recomputed_tokens == 0
