"""Counter-based random numbers (Philox 4x32-10): a pure function of key and counter, so that a sample depends on
(seed, choice, position) alone and not on what else runs, or where."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]  # 32-bit words, held in 64 bits so that products do not overflow

_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_MASK, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
_ROUNDS = 10


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Four random 32-bit words for each counter and key; arrays of one length, elementwise."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for round_index in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        key_0 = k0 + np.uint64(round_index * _WEYL_0 & 0xFFFFFFFF) & _MASK
        key_1 = k1 + np.uint64(round_index * _WEYL_1 & 0xFFFFFFFF) & _MASK
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ key_0, p1 & _MASK, (p0 >> _SHIFT) ^ c3 ^ key_1, p0 & _MASK
    return c0, c1, c2, c3


def uniform(seeds: list[int], choices: list[int], positions: list[int]) -> npt.NDArray[np.float32]:
    """One number in [0, 1) for each (seed, choice, position); seeds are any signed 64-bit integers."""
    seed = np.array([value % 2**64 for value in seeds], np.uint64)
    position = np.array(positions, np.uint64)
    choice = np.array(choices, np.uint64)
    counter = (position & _MASK, position >> _SHIFT, choice, np.zeros_like(choice))
    word = philox(counter, (seed & _MASK, seed >> _SHIFT))[0]
    numbers: npt.NDArray[np.float32] = np.ldexp((word >> np.uint64(8)).astype(np.float32), -24)
    return numbers
