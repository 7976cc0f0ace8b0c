"""Hints are believed as far as they have been right, and no further."""

from __future__ import annotations

import random

import pytest

from fastserve_hpc.core.hints import MIN_OBSERVED, HintTrust
from fastserve_hpc.core.lengths import FinishedLengths


def lengths(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [max(1, round(rng.lognormvariate(4, 1))) for _ in range(count)]


def test_nobody_is_believed_at_first() -> None:
    trust = HintTrust()
    for length in lengths(MIN_OBSERVED - 1):
        trust.note(length, length)
    assert trust.expected(50) is None
    trust.note(50, 50)
    assert trust.expected(70) == pytest.approx(70)


def test_a_common_bias_is_taken_off() -> None:
    trust = HintTrust()
    for length in lengths(100):
        trust.note(max(1, length // 4), length)
    expected = trust.expected(25)
    assert expected is not None
    assert expected == pytest.approx(100, rel=0.1)


@pytest.mark.parametrize("wrong", ["shuffled", "by 4 either way", "constant"])
def test_wrong_hints_are_not_believed(wrong: str) -> None:
    trust, rng, actual = HintTrust(), random.Random(1), lengths(300)
    hints = list(actual)
    rng.shuffle(hints)
    if wrong == "by 4 either way":
        hints = [max(1, round(length * rng.choice([0.25, 4.0]))) for length in actual]
    elif wrong == "constant":
        hints = [100] * 300
    for hint, length in zip(hints, actual, strict=True):
        trust.note(hint, length)
    assert not trust.is_trusted


def test_trust_can_be_lost_and_won() -> None:
    trust = HintTrust()
    states = []
    for hints in (lengths(200, 3), lengths(200, 4), lengths(200, 3)):
        for hint, actual in zip(hints, lengths(200, 3), strict=True):
            trust.note(hint, actual)
        states.append(trust.is_trusted)
    assert states == [True, False, True]


def test_identical_lengths_teach_nothing() -> None:
    trust = HintTrust()
    for _ in range(100):
        trust.note(64, 64)
    assert not trust.is_trusted


def test_means_start_at_their_priors_and_follow_the_recent() -> None:
    seen = FinishedLengths()
    assert (seen.harmonic, seen.mean, seen.num_finished) == (50, 200, 0)
    for count in [4000] * 300 + [10, 40] * 100:
        seen.note(count)
    assert seen.num_finished == 500
    assert seen.harmonic == pytest.approx(204 / (100 / 10 + 100 / 40 + 4 / 50))
    assert seen.mean == pytest.approx((100 * 50 + 20 * 200) / 220)
