from __future__ import annotations

from scheduling import request

from fastserve_hpc.core.cost import CostModel
from fastserve_hpc.core.policy.by_class import ByClass
from fastserve_hpc.core.policy.fcfs import Fcfs
from fastserve_hpc.core.policy.skip_join import SkipJoin
from fastserve_hpc.core.sequence import Sequence


def test_interactive_before_batch_each_in_its_order() -> None:
    policy = ByClass(Fcfs)
    sequences = [Sequence(request(i), 0.0) for i in range(10)]  # 4 and 9 are of class batch
    for sequence in reversed(sequences):
        policy.add(sequence, 0.0)
    ranked = list(policy.ranked(0.0))
    assert [sequence.request_id for sequence in ranked] == [8, 7, 6, 5, 3, 2, 1, 0, 9, 4]
    assert ranked == sorted(ranked, key=policy.order_key)
    policy.remove(sequences[9], is_complete=True)
    assert [sequence.request_id for sequence in policy.ranked(0.0)][-2:] == [0, 4]


def test_names_and_counters_are_those_of_both() -> None:
    policy = ByClass(lambda: SkipJoin(4, CostModel()))
    policy.add(Sequence(request(4), 0.0), 0.0)
    assert policy.name == "skip-join"
    counters = policy.counters()
    assert counters["pinned"] == counters["batch_pinned"] == 0
