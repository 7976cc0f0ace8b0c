"""The fake worker answers readably and refuses plans that no worker could execute rightly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from scheduling import request

from fastserve_hpc.core.plan import BlockCopy, IterationPlan, NewRequest, SequenceSlice
from fastserve_hpc.core.request import Request, SamplingParams
from fastserve_hpc.worker.fake import EOS, FakeWorker, PlanViolation, answer


def new(wanted: Request) -> NewRequest:
    return NewRequest(wanted.request_id, wanted.prompt, wanted.sampling, wanted.choice)


def prefill(request_id: int = 1, prompt_len: int = 6, slots: tuple[int, ...] = (0, 1)) -> IterationPlan:
    """Plan 1: the whole prompt."""
    piece = SequenceSlice(request_id, 0, prompt_len, 0, slots, (), True)
    return IterationPlan(1, (piece,), (new(request(request_id, prompt_len)),))


def after_prefill() -> tuple[FakeWorker, int]:
    """A worker with one request in slots 0 and 1, and the token that it sampled."""
    worker = FakeWorker(block_size=4, num_blocks=8)
    result = worker.execute(prefill()).result
    assert result is not None
    return worker, result.token_ids[0]


def test_answers_are_readable_differ_and_mostly_end() -> None:
    answers = [answer(r.prompt, r.sampling) for r in (request(i, max_tokens=120) for i in range(40))]
    assert all(tokens[-1] == EOS for tokens in answers)
    assert len({len(tokens) for tokens in answers}) > 20
    assert len(set(answers)) == 40
    for tokens in answers:
        text = bytes(tokens[:-1]).decode("ascii")
        assert all(word.isalpha() for word in text.split())


def test_an_answer_depends_on_prompt_and_choice_alone() -> None:
    sampling = SamplingParams(max_tokens=50, temperature=1.0, seed=3)
    assert answer((1, 2, 3), sampling) == answer((1, 2, 3), replace(sampling, seed=4, max_tokens=50))
    assert len({answer((1, 2, 3), sampling, choice) for choice in range(4)}) == 4


def test_min_tokens_and_ignored_eos() -> None:
    patient = SamplingParams(max_tokens=150, min_tokens=150, stop_token_ids=(EOS, ord(" ")))
    assert not {EOS, ord(" ")} & set(answer((5,), patient))
    assert EOS in answer((5,), SamplingParams(max_tokens=150))


def test_a_rank_reports_its_result_and_where_it_stands() -> None:
    worker, token = after_prefill()
    assert (token,) == answer(request(1, 6).prompt, request(1, 6, max_tokens=1).sampling)
    report = worker.execute(IterationPlan(2, (SequenceSlice(1, 6, 1, 2, (), (token,), True),)))
    assert (report.rank, report.plan_id, report.result and report.result.plan_id) == (0, 2, 2)
    silent = FakeWorker(block_size=4, rank=3, has_result=False).execute(prefill())
    assert (silent.rank, silent.plan_id, silent.result) == (3, 1, None)


def test_the_delay_is_an_iteration_s_not_an_empty_plan_s() -> None:
    slept: list[float] = []
    worker = FakeWorker(block_size=4, delay_s=0.5, sleep=slept.append)
    worker.execute(prefill())
    worker.execute(IterationPlan(2, finished=(1,)))
    assert slept == [0.5]
    assert worker.request_ids == []


def decode(token: int, **changes: Any) -> IterationPlan:
    piece = SequenceSlice(1, 6, 1, 2, (), (token,), True)
    return IterationPlan(2, (piece._replace(**changes),))


@pytest.mark.parametrize(
    ("changes", "violation"),
    [
        ({"request_id": 2}, "request 2 is unknown"),
        ({"token_ids": ()}, "only 6 tokens are known"),
        ({"token_ids": (1, 2)}, "brings 2 tokens to 6 known ones"),
        ({"num_tokens": 0, "token_ids": ()}, "no tokens"),
        ({"start": 4, "num_tokens": 1, "token_ids": ()}, "samples a token that is known"),
        ({"num_kept_blocks": 3}, "keeps 3 blocks of 2"),
        ({"num_kept_blocks": 1}, "1 blocks do not hold it"),
        ({"num_kept_blocks": 1, "new_slots": (5,)}, "slot 5 does not hold 4..5"),
        ({"new_slots": (0,)}, "a slot is in the table twice"),
        ({"new_slots": (8,)}, r"slots \(8,\) of 8"),
    ],
)
def test_a_slice_that_cannot_be_right_is_refused(changes: dict[str, Any], violation: str) -> None:
    worker, token = after_prefill()
    with pytest.raises(PlanViolation, match=violation):
        worker.execute(decode(token, **changes))


def test_a_slot_that_another_request_has_overwritten_is_noticed() -> None:
    worker, token = after_prefill()
    other = SequenceSlice(2, 0, 6, 0, (1, 2), (), True)
    worker.execute(IterationPlan(2, (other,), (new(request(2, 6)),)))
    with pytest.raises(PlanViolation, match=r"request 1, positions 6..6: slot 1 does not hold 4..5"):
        worker.execute(replace(decode(token), plan_id=3))


def test_equal_tokens_at_equal_positions_may_share_a_slot() -> None:
    worker, _ = after_prefill()
    twin = NewRequest(2, request(1, 6).prompt, request(1).sampling, 1)
    shared = SequenceSlice(2, 4, 2, 0, (0, 3), (), True)
    assert worker.execute(IterationPlan(2, (shared,), (twin,))).result is not None


def test_a_preempted_request_is_computed_again_elsewhere() -> None:
    worker, token = after_prefill()
    again = SequenceSlice(1, 0, 7, 0, (4, 5), (token,), True)
    result = worker.execute(IterationPlan(2, (again,))).result
    assert result is not None
    wanted = request(1, 6, max_tokens=2, stop_token_ids=())
    assert (token, *result.token_ids) == answer(wanted.prompt, wanted.sampling)


@pytest.mark.parametrize(
    ("plan", "violation"),
    [
        (IterationPlan(3), "plan 3 follows plan 1"),
        (IterationPlan(2, finished=(5,)), "request 5 to forget is unknown"),
        (IterationPlan(2, new_requests=(new(request(1)),)), "request 1 was sent twice"),
        (IterationPlan(2, (SequenceSlice(1, 6, 1, 2),) * 2), "two slices of one request"),
        (IterationPlan(2, copies=(BlockCopy(2, 0, 0, False),)), "copy 2 follows copy 0"),
    ],
)
def test_a_plan_that_cannot_be_right_is_refused(plan: IterationPlan, violation: str) -> None:
    worker, _ = after_prefill()
    with pytest.raises(PlanViolation, match=violation):
        worker.execute(plan)


def test_nothing_follows_the_shutdown() -> None:
    worker, _ = after_prefill()
    worker.execute(IterationPlan(2, finished=(1,), shutdown=True))
    with pytest.raises(PlanViolation, match="plan 3 after the shutdown"):
        worker.execute(IterationPlan(3))


def test_a_block_survives_its_way_to_the_host_and_back() -> None:
    worker, token = after_prefill()
    offload = tuple(BlockCopy(i + 1, i, 7 - i, to_device=False) for i in range(2))
    assert worker.execute(IterationPlan(2, copies=offload)).copies_done == 2
    overwrite = SequenceSlice(2, 0, 8, 0, (0, 1), (), True)
    worker.execute(IterationPlan(3, (overwrite,), (new(request(2, 8)),)))
    upload = tuple(BlockCopy(i + 3, i + 4, 7 - i, to_device=True) for i in range(2))
    resumed = SequenceSlice(1, 6, 1, 0, (4, 5), (token,), True)
    report = worker.execute(IterationPlan(4, (resumed,), copies=upload))
    assert report.copies_done == 4
    assert report.result is not None
