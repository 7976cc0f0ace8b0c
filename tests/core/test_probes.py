"""Probes: plans that any rank can compute, whatever its limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve_hpc.core.probes import Probe, ProbeLimits, ProbePlans, probes


def limits(**changes: int) -> ProbeLimits:
    plain = {"max_batch": 64, "max_batch_tokens": 512, "max_model_len": 2048, "num_blocks": 1000, "block_size": 16}
    return ProbeLimits(**{**plain, **changes})


def test_prompts_and_decodes_of_several_sizes_are_measured() -> None:
    found = probes(limits())
    assert {probe.num_sequences for probe in found if probe.num_tokens == 1} == {1, 4, 16, 64}
    assert {probe.num_tokens for probe in found} == {1, 64, 192}
    assert len(set(found)) == len(found)


@given(
    st.builds(
        ProbeLimits,
        max_batch=st.integers(1, 100),
        max_batch_tokens=st.integers(1, 600),
        max_model_len=st.integers(2, 3000),
        num_blocks=st.integers(1, 300),
        block_size=st.sampled_from([1, 16, 64]),
    )
)
def test_every_plan_is_within_the_limits(some: ProbeLimits) -> None:
    plans = ProbePlans(some.block_size)
    for number, probe in enumerate(probes(some), 1):
        plan = plans.plan(probe)
        assert plan.plan_id == plans.last_plan_id == number
        assert 1 <= len(plan.slices) <= some.max_batch
        assert plan.num_tokens <= some.max_batch_tokens
        slots = [slot for piece in plan.slices for slot in piece.new_slots]
        assert sorted(set(slots)) == sorted(slots)
        assert max(slots) < some.num_blocks
        for piece, new in zip(plan.slices, plan.new_requests, strict=True):
            assert piece.request_id == new.request_id < 0
            assert piece.end == len(new.prompt) < some.max_model_len
            assert piece.end <= len(piece.new_slots) * some.block_size


def test_each_plan_forgets_the_one_before() -> None:
    plans = ProbePlans(16)
    first, second, end = plans.plan(Probe(2, 0, 3)), plans.plan(Probe(1, 4, 1)), plans.end()
    assert [new.request_id for new in first.new_requests] == [-1, -2]
    assert second.finished == (-1, -2)
    assert [new.request_id for new in second.new_requests] == [-3]
    assert (end.finished, end.slices, end.plan_id) == ((-3,), (), 3)


@pytest.mark.parametrize("change", [{"max_batch": 1}, {"max_batch_tokens": 1}, {"num_blocks": 1}])
def test_narrow_limits_leave_some_to_measure(change: dict[str, int]) -> None:
    assert probes(limits(**change))
