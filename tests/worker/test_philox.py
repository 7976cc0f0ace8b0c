"""The counter-based generator: published known answers, and what sampling relies on."""

from __future__ import annotations

import numpy as np
import pytest

from fastserve_hpc.core.request import MAX_SEED
from fastserve_hpc.worker.philox import philox, uniform

ALL_ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ALL_ONES,) * 4, (ALL_ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_gives_the_published_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (np.array([word], np.uint64) for word in counter)
    k0, k1 = (np.array([word], np.uint64) for word in key)
    assert tuple(int(word[0]) for word in philox((c0, c1, c2, c3), (k0, k1))) == words


def test_number_depends_on_its_own_seed_choice_and_position_only() -> None:
    seeds, choices, positions = [5, -3, MAX_SEED, -MAX_SEED], [0, 1, 63, 2], [7, 0, 100_000, 1]
    together = uniform(seeds, choices, positions)
    alone = [uniform([s], [c], [p])[0] for s, c, p in zip(seeds, choices, positions, strict=True)]
    assert together.tolist() == alone
    assert together.dtype == np.float32


@pytest.mark.parametrize("vary", ["seed", "choice", "position"])
def test_numbers_are_uniform_along_each_part_of_the_counter(vary: str) -> None:
    count = 20_000
    parts = {name: list(range(count)) if name == vary else [3] * count for name in ("seed", "choice", "position")}
    numbers = uniform(parts["seed"], parts["choice"], parts["position"])
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    histogram = np.histogram(numbers, bins=100, range=(0.0, 1.0))[0]
    chi_square = float(((histogram - count / 100) ** 2 / (count / 100)).sum())
    assert chi_square < 160  # 99 degrees of freedom: the 0.9999 quantile
    correlation = np.corrcoef(numbers[:-1], numbers[1:])[0, 1]
    assert abs(correlation) < 4 / np.sqrt(count)


def test_seeds_that_differ_only_above_32_bits_or_in_sign_differ() -> None:
    numbers = uniform([1, 1 + 2**32, -1, 2**62], [0] * 4, [9] * 4)
    assert len(set(numbers.tolist())) == 4
