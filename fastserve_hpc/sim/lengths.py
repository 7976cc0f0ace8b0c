"""Lengths of prompts and answers, drawn from quantiles."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from fastserve_hpc.errors import ConfigError


@dataclass(frozen=True, slots=True)
class QuantileLengths:
    """Prompt and answer lengths as evenly spaced quantiles, from the 0th to the 100th percentile."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    min_tokens: int = 1
    """Pairs of which both are shorter are drawn again, as in the FastServe authors' benchmark."""
    max_prompt: int | None = None
    """Longer prompts are drawn again."""
    max_total: int | None = None
    """Pairs that are longer together are drawn again."""

    def draw(self, rng: Random) -> tuple[int, int]:
        """(prompt tokens, output tokens), each at least 1."""
        while True:
            prompt, output = _at(self.prompt, rng.random()), _at(self.output, rng.random())
            if self._is_usable(prompt, output):
                return prompt, output

    def _is_usable(self, prompt: int, output: int) -> bool:
        if max(prompt, output) < self.min_tokens or prompt > (self.max_prompt or prompt):
            return False
        return self.max_total is None or prompt + output <= self.max_total


def _at(quantiles: tuple[int, ...], place: float) -> int:
    place *= len(quantiles) - 1
    below = int(place)
    low, high = quantiles[below], quantiles[min(below + 1, len(quantiles) - 1)]
    return max(1, round(low + (high - low) * (place - below)))


def find_lengths(name: str) -> QuantileLengths:
    """`sharegpt`, or a JSON file with `input_q0_100` and `output_q0_100`. Raises `ConfigError`."""
    if name == "sharegpt":
        return SHAREGPT
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"--lengths {name}: use sharegpt or a JSON file of quantiles")
    try:
        values: dict[str, Any] = json.loads(path.read_bytes())
        prompt, output = (_quantiles(values[key]) for key in ("input_q0_100", "output_q0_100"))
        limits = {key: int(values[key]) for key in ("min_tokens", "max_prompt", "max_total") if key in values}
        return QuantileLengths(prompt, output, **limits)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--lengths {path}: no input_q0_100 and output_q0_100 of ascending counts: {error}") from None


def _quantiles(values: list[Any]) -> tuple[int, ...]:
    quantiles = tuple(int(value) for value in values)
    if len(quantiles) < 2 or list(quantiles) != sorted(quantiles) or quantiles[0] < 1:
        raise ValueError("at least two, ascending, from 1")
    return quantiles


# fmt: off
SHAREGPT = QuantileLengths(
    prompt=(
        1, 2, 3, 5, 6, 7, 7, 8, 8, 8, 9, 9, 10, 10, 11, 11, 11, 12, 12, 13, 13, 13, 14, 14, 15, 15, 16,
        16, 17, 17, 18, 18, 19, 20, 20, 21, 22, 22, 23, 24, 24, 25, 26, 27, 28, 29, 30, 31, 33, 34, 35,
        37, 38, 40, 42, 44, 46, 48, 50, 52, 55, 58, 61, 64, 67, 71, 75, 79, 84, 89, 94, 100, 107, 115,
        123, 133, 144, 157, 169, 185, 203, 222, 241, 266, 294, 324, 355, 385, 419, 458, 507, 558, 620,
        693, 775, 864, 986, 1088, 1230, 1464, 2028,
    ),
    output=(
        1, 4, 10, 11, 17, 22, 26, 31, 35, 40, 45, 51, 57, 63, 70, 75, 80, 86, 91, 96, 101, 106, 111,
        117, 122, 128, 133, 139, 145, 151, 157, 164, 170, 176, 182, 188, 194, 199, 205, 211, 216, 222,
        227, 233, 239, 244, 249, 254, 260, 266, 271, 277, 282, 288, 294, 300, 306, 312, 317, 323, 330,
        337, 343, 350, 357, 364, 372, 379, 387, 395, 405, 413, 424, 435, 445, 458, 471, 483, 496, 511,
        525, 540, 559, 577, 598, 619, 640, 666, 694, 725, 754, 768, 786, 812, 846, 899, 961, 1040, 1139,
        1280, 2009,
    ),
    min_tokens=4,
    max_prompt=1024,
    max_total=2048,
)
# fmt: on
"""First turns of ShareGPT in tokens of OPT: percentiles 0 to 100 of the 79,731 pairs of at most 2,048 tokens in the
artefact of vLLM's SOSP'23 paper (means 161 and 338, correlation 0.04). Statistics only; no text is taken from it.
What is too short or too long is left out as the FastServe authors' benchmark does: pairs of which both have fewer
than 4 tokens, prompts over 1,024."""
