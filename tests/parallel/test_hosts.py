from __future__ import annotations

import os
import threading

import pytest

from fastserve_hpc.parallel.hosts import CoreShare, RankPlace, share_cores
from fastserve_hpc.parallel.idle import SPIN_CROWDED_S, SPIN_S, Waiter


def shares(masks: list[int], tp: int) -> list[CoreShare]:
    """Of all ranks on a host."""
    places = [RankPlace(mask, *divmod(rank, tp)) for rank, mask in enumerate(masks)]
    return [share_cores(place, places) for place in places]


@pytest.mark.parametrize(
    ("masks", "expected"),
    [([0b1111], 4), ([0b1111] * 2, 2), ([0b1111] * 3, 1), ([0b0011, 0b1100], 2), ([0b1], 1)],
)
def test_threads_are_the_share_of_the_cores(masks: list[int], expected: int) -> None:
    assert shares(masks, 1) == [CoreShare(expected)] * len(masks)


@pytest.mark.parametrize(
    ("masks", "tp", "expected"),
    [([0b11] * 3, 1, 2), ([0b11] * 6, 1, 2), ([0b1] * 2, 1, 1), ([0b11] * 4, 2, 1), ([0b11] * 6, 2, 1)],
)
def test_stages_on_too_few_cores_take_turns(masks: list[int], tp: int, expected: int) -> None:
    assert shares(masks, tp) == [CoreShare(expected, is_crowded=True)] * len(masks)


def test_of_a_stage_of_too_many_ranks_some_are_bound_and_the_rest_fills_their_gaps() -> None:
    filler = CoreShare(2, is_crowded=True, gives_way=True)
    first, second = (CoreShare(1, is_crowded=True, core=core) for core in (4, 6))
    assert shares([0b1010000] * 3, 3) == [filler, first, second]
    assert shares([0b1010000] * 6, 3) == [filler, first, second] * 2
    assert shares([0b1010000] * 4, 4) == [first, second, first, second]
    assert shares([0b1010000] * 5, 5) == [filler, first, second, first, second]
    assert shares([0b1] * 2, 2) == [CoreShare(1, is_crowded=True, core=0)] * 2


def test_every_core_of_a_stage_has_as_much_to_do() -> None:
    for num_cores in range(1, 9):
        for num_ranks in range(num_cores + 1, 20):
            load = [0.0] * num_cores
            for share in shares([2**num_cores - 1] * num_ranks, num_ranks):
                for core in range(num_cores) if share.core is None else [share.core]:
                    load[core] += 1 / share.num_threads
            assert load == pytest.approx([num_ranks / num_cores] * num_cores)


def test_settling_is_of_the_thread_and_of_those_it_starts() -> None:
    found: list[tuple[set[int], int]] = []

    def look() -> None:
        found.append((os.sched_getaffinity(0), os.sched_getscheduler(0)))

    def settle(share: CoreShare) -> None:
        share.settle()
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()

    before = os.sched_getaffinity(0), os.sched_getscheduler(0)
    core = max(before[0])
    for share in (CoreShare(1, core=core), CoreShare(2, gives_way=True), CoreShare(1, core=10**4)):
        thread = threading.Thread(target=settle, args=(share,))
        thread.start()
        thread.join()
    assert found == [({core}, os.SCHED_OTHER), (before[0], os.SCHED_BATCH), before]
    assert (os.sched_getaffinity(0), os.sched_getscheduler(0)) == before


def test_a_waiter_knows_whether_cores_are_short() -> None:
    assert Waiter(spin_s=SPIN_CROWDED_S).is_crowded
    assert not Waiter(spin_s=SPIN_S).is_crowded
