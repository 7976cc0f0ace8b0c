"""What a server takes on when the time limit of its job is near."""

from __future__ import annotations

import pytest
from scheduling import request

from fastserve_hpc.core.cost import CostModel, Costs
from fastserve_hpc.errors import RequestError
from fastserve_hpc.server.job_end import JobEnd

COSTS = Costs(fixed_s=0.09, prefill_token_s=0.001, prefill_attention_s=0.0, decode_sequence_s=0.01, kv_token_s=0.0)
"""10 tokens a second alone."""


def job_end(left_s: float, drain_s: float = 25.0) -> JobEnd:
    cost = CostModel(COSTS)
    cost.num_observed = 1000
    return JobEnd.after(left_s, 100.0, drain_s, cost)


def test_the_end_begins_as_early_as_a_drain_may_take_but_not_before_three_quarters() -> None:
    assert job_end(3600.0).drain_at == 100 + 3600 - 30
    assert job_end(60.0).drain_at == 100 + 45
    assert job_end(-5.0).drain_at == 95.0


def test_what_surely_cannot_be_finished_is_refused() -> None:
    end = job_end(20.0)
    end.check(request(1, prompt_len=100, max_tokens=190, stop_token_ids=()), 100.0)
    with pytest.raises(RequestError, match=r"ends in 20 s, .* of prompt and 210 of answer take 21 s") as info:
        end.check(request(1, prompt_len=100, max_tokens=210, stop_token_ids=()), 100.0)
    assert info.value.code == "job_ending"
    with pytest.raises(RequestError, match="ask for fewer, or another server"):
        end.check(request(1, max_tokens=210, min_tokens=205, stop_token_ids=(1,)), 100.0)


def test_what_may_end_early_is_taken_until_shortly_before() -> None:
    end = job_end(20.0)
    end.check(request(1, max_tokens=5000, stop_token_ids=(1,)), 118.0)
    with pytest.raises(RequestError):
        end.check(request(1, max_tokens=5000, stop_token_ids=(1,)), 119.0)
    end.check(request(1, max_tokens=2, stop_token_ids=()), 119.5)


def test_nothing_is_foretold_before_there_are_measurements() -> None:
    end = JobEnd.after(1.0, 0.0, 25.0, CostModel())
    end.check(request(1, max_tokens=5000, stop_token_ids=()), 0.0)
