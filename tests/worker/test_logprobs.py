"""Log-probabilities against a row-by-row reference; equals come in id order."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastserve_hpc.worker.logprobs import score_prompt, token_logprobs


def expected_top(logprobs: list[float], count: int) -> list[int]:
    return sorted(range(len(logprobs)), key=lambda token_id: (-logprobs[token_id], token_id))[:count]


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 2.0]), min_size=9, max_size=9), min_size=1),
    data=st.data(),
)
def test_most_likely_tokens_with_many_ties(values: list[list[float]], data: st.DataObject) -> None:
    logprobs = torch.log_softmax(torch.tensor(values), dim=-1)
    counts = data.draw(st.lists(st.integers(0, 12), min_size=len(values), max_size=len(values)))
    token_ids = data.draw(st.lists(st.integers(0, 8), min_size=len(values), max_size=len(values)))
    for i, entry in enumerate(token_logprobs(logprobs, token_ids, counts)):
        as_list = logprobs[i].tolist()
        assert entry.token_id == token_ids[i]
        assert entry.logprob == as_list[token_ids[i]]
        assert [token_id for token_id, _ in entry.top] == expected_top(as_list, counts[i])
        assert [logprob for _, logprob in entry.top] == [as_list[token_id] for token_id, _ in entry.top]


def test_all_equal_logits_give_the_lowest_ids() -> None:
    (entry,) = token_logprobs(torch.log_softmax(torch.zeros(1, 5000), dim=-1), [77], [3])
    assert [token_id for token_id, _ in entry.top] == [0, 1, 2]
    assert entry.logprob == pytest.approx(-math.log(5000), abs=1e-5)


def test_long_prompt_is_scored_as_row_by_row() -> None:
    logits = torch.randn(150, 40, generator=torch.Generator().manual_seed(2))
    token_ids = np.arange(150) % 40
    scores = score_prompt(logits, token_ids.tolist(), 2)
    alone = [score_prompt(logits[i : i + 1], [int(token_ids[i])], 2)[0] for i in range(150)]
    assert scores == alone
    exact = torch.log_softmax(logits.double(), dim=-1)
    for i, entry in enumerate(scores):
        assert entry.logprob == pytest.approx(exact[i, token_ids[i]].item(), abs=1e-5)


def test_row_that_is_not_numbers_gives_nan_and_leaves_the_others() -> None:
    logits = torch.zeros(3, 10)
    logits[1, 4] = math.nan
    first, second, third = score_prompt(logits, [1, 2, 3], 2)
    assert math.isnan(second.logprob)
    assert first.top == third.top
    assert len(first.top) == 2


def test_nothing_to_score() -> None:
    assert score_prompt(torch.zeros(0, 10), [], 3) == []
