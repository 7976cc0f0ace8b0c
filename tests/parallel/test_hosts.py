from __future__ import annotations

from typing import Any

import pytest

from fastserve_hpc.parallel import hosts
from fastserve_hpc.parallel.idle import SPIN_CROWDED_S, SPIN_S, Waiter


@pytest.mark.parametrize(
    ("own", "everyone", "expected"),
    [
        (0b1111, [0b1111], 4),
        (0b1111, [0b1111] * 2, 2),
        (0b1111, [0b1111] * 3, 1),
        (0b0011, [0b0011, 0b1100], 2),
        (0b11, [0b11] * 3, 2),
        (0b11, [0b11] * 6, 2),
        (0b1, [0b1] * 2, 1),
    ],
)
def test_threads_are_the_share_of_the_cores_or_two_where_ranks_are_more(
    monkeypatch: pytest.MonkeyPatch, own: int, everyone: list[int], expected: int
) -> None:
    world: Any = None
    monkeypatch.setattr(hosts, "_own_mask", lambda: own)
    monkeypatch.setattr(hosts, "_masks_here", lambda _: everyone)
    assert hosts.threads_of_this_rank(world) == expected


def test_a_waiter_knows_whether_cores_are_short() -> None:
    assert Waiter(spin_s=SPIN_CROWDED_S).is_crowded
    assert not Waiter(spin_s=SPIN_S).is_crowded
