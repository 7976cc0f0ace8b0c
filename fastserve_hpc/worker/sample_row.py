"""What a row of logits is sampled by."""

from __future__ import annotations

from typing import NamedTuple

from fastserve_hpc.core.request import SamplingParams
from fastserve_hpc.worker.sequences import IntArray

NO_TOKEN = -1
"""Sampled where the logits are not numbers, or no token is allowed."""
_GREEDY_BELOW = 1e-5
"""A lower temperature would only turn the rounding errors of the logits into choices."""


class SampleRow(NamedTuple):
    """One row: the request's parameters and its tokens."""

    sampling: SamplingParams
    choice: int
    num_prompt_tokens: int
    record: IntArray
    """The prompt and the output so far; its length is the position of the new token."""

    @property
    def output(self) -> IntArray:
        return self.record[self.num_prompt_tokens :]

    @property
    def is_greedy(self) -> bool:
        return (self.sampling.temperature or 0.0) < _GREEDY_BELOW or self.sampling.top_k == 1
