"""First come, first served, at any length of the queue."""

from __future__ import annotations

import time
from itertools import islice

from scheduling import request

from fastserve_hpc.core.policy.fcfs import Fcfs
from fastserve_hpc.core.sequence import Sequence


def filled(count: int) -> tuple[Fcfs, list[Sequence]]:
    policy = Fcfs()
    sequences = [Sequence(request(i), arrived=0.0) for i in range(count)]
    for sequence in sequences:
        policy.add(sequence, now=0.0)
    return policy, sequences


def test_order_is_that_of_arrival_whatever_leaves() -> None:
    policy, sequences = filled(5)
    for gone in (2, 0):
        policy.remove(sequences[gone], is_complete=True)
    policy.on_progress(sequences[1], num_tokens=3, now=1.0)
    assert [s.request_id for s in policy.ranked(2.0)] == [1, 3, 4]
    keys = [policy.order_key(s) for s in policy.ranked(2.0)]
    assert keys == sorted(keys)


def test_the_head_of_a_queue_that_was_long_costs_no_more() -> None:
    """Removed heads must not be stepped over at each look."""
    policy, sequences = filled(20_000)
    for sequence in sequences[:-10]:
        policy.remove(sequence, is_complete=True)
    begin = time.perf_counter()
    for _ in range(1000):
        assert len(list(islice(policy.ranked(0.0), 10))) == 10
    assert time.perf_counter() - begin < 0.3
