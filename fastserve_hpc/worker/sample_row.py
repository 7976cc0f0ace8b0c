"""What a row of logits is sampled by."""

from __future__ import annotations

from typing import NamedTuple

from fastserve_hpc.core.request import SamplingParams
from fastserve_hpc.worker.greedy import is_greedy
from fastserve_hpc.worker.sequences import IntArray

NO_TOKEN = -1
"""Sampled where the logits are not numbers, or no token is allowed."""


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
        return is_greedy(self.sampling)
