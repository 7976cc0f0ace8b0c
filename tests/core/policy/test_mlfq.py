"""Queues by wall-clock quanta: the naive ones and the paper's."""

from __future__ import annotations

import pytest
from scheduling import request

from fastserve_hpc.core.cost import CostModel, Costs
from fastserve_hpc.core.policy.clairvoyant import Oracle, Srpt
from fastserve_hpc.core.policy.mlfq import Mlfq, PaperSkipJoin
from fastserve_hpc.core.sequence import Sequence

COST = CostModel(Costs(fixed_s=1.0, prefill_token_s=0.1, prefill_attention_s=0, decode_sequence_s=0, kv_token_s=0))
"""q0 is 1 s; a prompt of 10 tokens takes 2 s."""


def put(policy: Mlfq | Srpt, *prompts: int, now: float = 0.0, max_tokens: int = 16) -> list[Sequence]:
    sequences = [Sequence(request(i, prompt_len, max_tokens), now) for i, prompt_len in enumerate(prompts)]
    for sequence in sequences:
        policy.add(sequence, now)
    return sequences


def order(policy: Mlfq | Srpt, now: float) -> list[int]:
    ranked = list(policy.ranked(now))
    assert ranked == sorted(ranked, key=policy.order_key)
    return [sequence.request_id for sequence in ranked]


def advance(policy: Mlfq | Srpt, sequence: Sequence, begin: float, end: float) -> None:
    list(policy.ranked(begin))
    sequence.outputs.append(7)
    policy.on_progress(sequence, 1, end)


def test_everyone_enters_level_0_and_sinks_by_service() -> None:
    policy = Mlfq(COST)
    one, _ = put(policy, 10, 90)
    advance(policy, one, 0.0, 1.0)
    assert order(policy, 1.0) == [0, 1], "the quantum is used up, not exceeded"
    advance(policy, one, 1.0, 1.5)
    assert order(policy, 1.5) == [1, 0]
    assert policy.order_key(one)[0] == 1


def test_service_counts_anew_at_each_level_and_idle_time_does_not() -> None:
    policy = Mlfq(COST)
    (one,) = put(policy, 10)
    advance(policy, one, 0.0, 1.1)
    advance(policy, one, 50.0, 51.9)
    assert policy.order_key(one)[0] == 1
    advance(policy, one, 52.0, 52.2)
    assert policy.order_key(one)[0] == 2


@pytest.mark.parametrize(("prompt", "level"), [(1, 1), (10, 1), (11, 2), (29, 2), (31, 3), (1000, 7)])
def test_the_paper_joins_where_the_quantum_holds_the_prompt(prompt: int, level: int) -> None:
    policy = PaperSkipJoin(COST)
    (one,) = put(policy, prompt)
    assert policy.order_key(one)[0] == level


def test_the_paper_promotes_those_who_have_waited_too_long() -> None:
    policy = PaperSkipJoin(COST, starvation_bound_s=5.0)
    long, short = put(policy, 300, 10)
    advance(policy, short, 0.0, 4.0)
    assert order(policy, 5.0) == [1, 0]
    assert order(policy, 5.1) == [0, 1]
    assert policy.order_key(long)[0] == 0
    assert order(policy, 9.5) == [0, 1], "the wait of the other began at its last progress"
    assert order(policy, 11.0) == [1, 0], "the long one was promoted again, to the tail"
    assert policy.counters() == {"level_0": 2, "promoted": 3}
    policy.remove(long, is_complete=False)
    assert order(policy, 11.0) == [1]


def test_srpt_and_oracle_order_by_what_is_left() -> None:
    srpt, oracle = Srpt(1, COST), Oracle(1, COST)
    for policy in (srpt, oracle):
        policy.add(Sequence(request(0, 90, 2), 0.0), 0.0)
        policy.add(Sequence(request(1, 10, 9), 0.0), 0.0)
    assert order(srpt, 0.0) == [1, 0], "10 s against 11 s"
    assert order(oracle, 0.0) == [0, 1], "11 s x 2 tokens against 10 s x 9"
    third = Sequence(request(2, 10, 12), 0.0)
    srpt.add(third, 0.0)
    assert order(srpt, 0.0) == [1, 0, 2]
    third.outputs += [7] * 4
    srpt.on_progress(third, 10, 1.0)
    assert order(srpt, 1.0) == [2, 1, 0]
    srpt.remove(third, is_complete=True)
    assert order(srpt, 1.0) == [1, 0]
