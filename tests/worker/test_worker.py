"""The worker end to end on a tiny model: the same tokens however the coordinator cuts, delays or moves the work."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worker.tiny import GREEDY, MAX_MODEL_LEN, VOCAB_SIZE, Link, Slots, TinyModel, make_worker, new_request

from fastserve_hpc.core.plan import BlockCopy, IterationPlan, IterationResult, SequenceSlice, TokenLogprobs
from fastserve_hpc.core.request import SamplingParams
from fastserve_hpc.parallel.topology import Topology
from fastserve_hpc.worker.sequences import PlanError
from fastserve_hpc.worker.worker import Worker

PROMPT = [5, 17, 3, 44, 8, 29, 11]
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.2, seed=7, max_tokens=100)


class Coordinator:
    """Drives one worker, or the two stages of a pipeline, by hand-made plans."""

    def __init__(self, workers: list[Worker], slots: Slots):
        self.workers, self.slots = workers, slots
        self.plan_id = 0

    def plan(self, *slices: SequenceSlice, **parts: object) -> IterationResult:
        self.plan_id += 1
        plan = IterationPlan(self.plan_id, slices, **parts)  # type: ignore[arg-type]
        reports = [worker.execute(plan) for worker in self.workers]
        assert all(report.plan_id == self.plan_id for report in reports)
        assert all(report.result is None for report in reports[:-1])
        result = reports[-1].result
        assert result is not None
        assert result.plan_id == self.plan_id
        return result

    def decode(self, request_id: int, tokens: list[int], count: int) -> list[int]:
        """Generate `count` tokens behind `tokens`, of which the workers lack the last."""
        for _ in range(count):
            piece = self.slots.slice(request_id, len(tokens) - 1, 1, tokens[-1:], samples=True)
            tokens = [*tokens, *self.plan(piece).token_ids]
        return tokens

    def generate(self, request_id: int, prompt: list[int], sampling: SamplingParams, count: int) -> list[int]:
        first = self.plan(
            self.slots.slice(request_id, 0, len(prompt), samples=True),
            new_requests=(new_request(request_id, prompt, sampling),),
        )
        return self.decode(request_id, [*prompt, *first.token_ids], count - 1)[len(prompt) :]


def coordinator(slots: range | list[int] = range(32)) -> Coordinator:
    return Coordinator([make_worker()], Slots(slots))


def two_stages() -> Coordinator:
    link = Link()
    return Coordinator([make_worker(Topology(rank, 1, 2), link) for rank in range(2)], Slots(range(32)))


def expected_greedy(prompt: list[int], count: int) -> list[int]:
    """The tiny model's greedy answer, from its definition."""
    table = TinyModel(Topology())._table
    tokens = list(prompt)
    for _ in range(count):
        weights = torch.cos(torch.arange(len(tokens), dtype=torch.float32))
        tokens.append(int((table[tokens] * weights[:, None]).sum(dim=0).argmax()))
    return tokens[len(prompt) :]


def test_greedy_answer_is_the_models() -> None:
    assert coordinator().generate(1, PROMPT, GREEDY, 12) == expected_greedy(PROMPT, 12)


def test_two_stages_give_the_same_answer() -> None:
    assert two_stages().generate(1, PROMPT, SAMPLED, 12) == coordinator().generate(1, PROMPT, SAMPLED, 12)


@pytest.mark.parametrize("cuts", [[3], [1, 2, 3, 4, 5, 6], [4], [6]])
def test_prompt_in_chunks_gives_the_same_answer(cuts: list[int]) -> None:
    whole = coordinator().generate(1, PROMPT, SAMPLED, 6)
    one = coordinator()
    new: tuple[object, ...] = (new_request(1, PROMPT, SAMPLED),)
    for start, end in zip([0, *cuts], [*cuts, len(PROMPT)], strict=True):
        result = one.plan(one.slots.slice(1, start, end - start, samples=end == len(PROMPT)), new_requests=new)
        new = ()
    assert one.decode(1, [*PROMPT, *result.token_ids], 5)[len(PROMPT) :] == whole


def test_answers_do_not_depend_on_the_other_requests_of_the_batch() -> None:
    prompts = {i: PROMPT[i:] + PROMPT[:i] for i in range(1, 5)}
    params = {1: GREEDY, 2: SAMPLED, 3: replace(SAMPLED, top_k=3, seed=9), 4: replace(GREEDY, frequency_penalty=1.0)}
    alone = {i: coordinator().generate(i, prompts[i], params[i], 6) for i in prompts}
    one = coordinator()
    new = tuple(new_request(i, prompts[i], params[i]) for i in prompts)
    result = one.plan(*(one.slots.slice(i, 0, len(PROMPT), samples=True) for i in prompts), new_requests=new)
    answers = {i: [token_id] for i, token_id in zip(prompts, result.token_ids, strict=True)}
    for step in range(5):
        order = sorted(prompts, key=lambda i: (i + step) % 4)
        pieces = [one.slots.slice(i, len(PROMPT) + step, 1, answers[i][-1:], samples=True) for i in order]
        for i, token_id in zip(order, one.plan(*pieces).token_ids, strict=True):
            answers[i].append(token_id)
    assert answers == alone


def test_decode_without_a_token_uses_the_one_sampled_here() -> None:
    one = coordinator()
    first = one.plan(one.slots.slice(1, 0, 7, samples=True), new_requests=(new_request(1, PROMPT),)).token_ids
    second = one.plan(one.slots.slice(1, 7, 1, samples=True)).token_ids
    assert [*first, *second] == expected_greedy(PROMPT, 2)


def test_request_recomputed_in_other_blocks_goes_on_as_before() -> None:
    undisturbed = coordinator().generate(1, PROMPT, SAMPLED, 10)
    one = coordinator()
    tokens = PROMPT + one.generate(1, PROMPT, SAMPLED, 4)
    one.slots.release(1)
    one.slots.slice(99, 0, 10)  # others take the blocks
    pieces = one.slots.slice(1, 0, 9), one.slots.slice(1, 9, 2, tokens[-1:], samples=True)
    first = replace_kept(pieces[0], 0)
    one.plan(first)
    result = one.plan(pieces[1])
    assert one.decode(1, [*tokens, *result.token_ids], 5)[len(PROMPT) :] == undisturbed


def replace_kept(piece: SequenceSlice, kept: int) -> SequenceSlice:
    return piece._replace(num_kept_blocks=kept)


def test_request_offloaded_and_uploaded_elsewhere_goes_on_as_before() -> None:
    undisturbed = coordinator().generate(1, PROMPT, SAMPLED, 8)
    one = coordinator()
    tokens = PROMPT + one.generate(1, PROMPT, SAMPLED, 4)  # 10 stored tokens in blocks 0, 1, 2
    one.plan(copies=tuple(BlockCopy(i + 1, i, 20 + i, to_device=False) for i in range(3)))
    one.generate(2, PROMPT, GREEDY, 1)
    wait_for_copies(one.workers[0], 3)
    overwrite = Slots([0, 1, 2])
    one.plan(overwrite.slice(3, 0, 12), new_requests=(new_request(3, [1] * 12),))
    uploads = tuple(BlockCopy(i + 4, 28 + i, 20 + i, to_device=True) for i in range(3))
    piece = SequenceSlice(1, 10, 1, 0, (28, 29, 30), tuple(tokens[-1:]), samples=True)
    result = one.plan(piece, copies=uploads, needs_copies=6)
    one.slots.held[1] = [28, 29, 30]
    assert one.decode(1, [*tokens, *result.token_ids], 3)[len(PROMPT) :] == undisturbed
    wait_for_copies(one.workers[0], 6)
    assert one.workers[0].report().stall_s > 0


def wait_for_copies(worker: Worker, count: int) -> None:
    deadline = time.monotonic() + 10
    while worker.report().copies_done < count:
        assert time.monotonic() < deadline
        time.sleep(1e-4)


def test_plan_without_slices_only_takes_in_what_it_says() -> None:
    worker = make_worker()
    worker.execute(IterationPlan(1, (SequenceSlice(1, 0, 7, 0, (0, 1)),), (new_request(1, PROMPT),)))
    report = worker.execute(IterationPlan(2, finished=(1,)))
    assert (report.rank, report.plan_id, report.copies_done, report.free_bytes) == (0, 2, 0, 12345)
    assert report.result == IterationResult(2)
    with pytest.raises(PlanError, match="request 1: not known"):
        worker.execute(IterationPlan(3, (SequenceSlice(1, 7, 1, 2, (), (4,)),)))


def test_report_when_idle_has_no_result() -> None:
    worker = make_worker()
    worker.execute(IterationPlan(1, (SequenceSlice(1, 0, 7, 0, (0, 1)),), (new_request(1, PROMPT),)))
    assert worker.report().result is None
    assert worker.report().plan_id == 1


def test_compute_time_is_measured() -> None:
    one = coordinator()
    result = one.plan(one.slots.slice(1, 0, 7, samples=True), new_requests=(new_request(1, PROMPT),))
    assert 0 < result.compute_s < 10


def scored(prompt: list[int], count: int) -> list[TokenLogprobs | None]:
    """Prompt log-probabilities from the tiny model's definition."""
    table = TinyModel(Topology())._table
    entries: list[TokenLogprobs | None] = [None]
    for end in range(1, len(prompt)):
        weights = torch.cos(torch.arange(end, dtype=torch.float32))
        logprobs = torch.log_softmax((table[prompt[:end]] * weights[:, None]).sum(dim=0), dim=0)
        best = logprobs.topk(count)
        top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        entries.append(TokenLogprobs(prompt[end], logprobs[prompt[end]].item(), top))
    return entries


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_prompt_is_scored_once_in_order_however_it_is_cut_and_resumed(data: st.DataObject) -> None:
    prompt = data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=12))
    one = coordinator()
    new: tuple[object, ...] = (new_request(1, prompt, replace(GREEDY, prompt_logprobs=2)),)
    entries: list[TokenLogprobs | None] = []
    position = 0
    while position < len(prompt):
        if data.draw(st.integers(0, 4)) == 0:
            position = 0  # preempted, computed again
        end = data.draw(st.integers(position + 1, len(prompt)))
        piece = one.slots.slice(1, position, end - position, samples=end == len(prompt))
        result = one.plan(piece, new_requests=new)
        new = ()
        for request_id, chunk in result.prompt_logprobs:
            assert request_id == 1
            entries += chunk
        assert len(entries) >= end
        position = end
    expected = scored(prompt, 2)
    assert len(entries) == len(prompt)
    assert entries[0] is None
    for entry, wanted in zip(entries[1:], expected[1:], strict=True):
        assert entry is not None
        assert wanted is not None
        assert entry.token_id == wanted.token_id
        assert entry.logprob == pytest.approx(wanted.logprob, abs=1e-4)
        assert [token_id for token_id, _ in entry.top] == [token_id for token_id, _ in wanted.top]


def test_request_that_ends_while_its_prompt_is_scored_leaves_nothing_behind() -> None:
    one = coordinator()
    new = (new_request(1, PROMPT, replace(GREEDY, prompt_logprobs=2)),)
    one.plan(one.slots.slice(1, 0, 3), new_requests=new)
    one.plan(finished=(1,))
    worker = one.workers[0]
    assert len(worker._table) == 0
    assert not worker._outputs._next_scores


def test_logprobs_stand_beside_the_tokens_of_those_who_want_them() -> None:
    one = coordinator()
    new = (new_request(1, PROMPT, replace(GREEDY, logprobs=3)), new_request(2, PROMPT))
    result = one.plan(one.slots.slice(1, 0, 7, samples=True), one.slots.slice(2, 0, 7, samples=True), new_requests=new)
    (entry, none) = result.logprobs
    assert none is None
    assert entry is not None
    assert entry.token_id == result.token_ids[0] == entry.top[0][0]
    assert entry.logprob == entry.top[0][1]
    assert len(entry.top) == 3
    assert result.prompt_logprobs == ()


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes the tiny model's logits, or what it says of them, NaN in one row."""
    forward = TinyModel.forward

    def install(row: int) -> None:
        def spoilt(self: TinyModel, *args: object) -> torch.Tensor:
            output = forward(self, *args)  # type: ignore[arg-type]
            output[row] = torch.nan if output.is_floating_point() else -1
            return output

        monkeypatch.setattr(TinyModel, "forward", spoilt)

    return install


@pytest.mark.parametrize("logprobs", [None, 1])
def test_output_that_is_no_number_is_the_error_of_its_request_only(
    spoil: Callable[[int], None], logprobs: int | None
) -> None:
    spoil(1)
    one = coordinator()
    new = tuple(new_request(i, PROMPT, replace(GREEDY, logprobs=logprobs)) for i in (1, 2))
    pieces = [one.slots.slice(i, 0, 7, samples=True) for i in (1, 2)]
    result = one.plan(*pieces, new_requests=new)
    assert result.token_ids == (expected_greedy(PROMPT, 1)[0], -1)
    ((request_id, message),) = result.errors
    assert request_id == 2
    assert "not a number" in message
    assert "--dtype float32" in message


def test_what_is_no_number_does_not_reach_the_next_owner_of_its_block() -> None:
    """Neither on the device nor by way of the host, and whether its output has been looked at or not."""
    one = coordinator([4, 5])
    kv = one.workers[0]._kv
    one.plan(one.slots.slice(1, 0, 6), new_requests=(new_request(1, PROMPT),))
    kv.device_tier[[4, 5]] = torch.nan
    one.plan(copies=tuple(BlockCopy(i + 1, 4 + i, 20 + i, to_device=False) for i in range(2)))
    wait_for_copies(one.workers[0], 2)
    one.plan(copies=tuple(BlockCopy(i + 3, 28 + i, 20 + i, to_device=True) for i in range(2)))
    wait_for_copies(one.workers[0], 4)
    assert kv.device_tier[[28, 29]].isnan().all()
    one.plan(finished=(1,))
    for request_id, slots in ((2, [4, 5, 28]), (3, [29, 28, 5])):
        one.slots = Slots(slots)
        assert one.generate(request_id, PROMPT, GREEDY, 3) == expected_greedy(PROMPT, 3)
    one.plan(copies=tuple(BlockCopy(i + 5, slot, 20 + i, to_device=False) for i, slot in enumerate([29, 28])))
    wait_for_copies(one.workers[0], 6)
    on_host, on_device = kv.host_tier[[20, 21]].view(torch.int32), kv.device_tier[[29, 28]].view(torch.int32)
    assert torch.equal(on_host, on_device), "whole blocks"


def test_a_block_is_cleared_once_when_it_is_begun() -> None:
    one = coordinator([4, 5, 6])
    kv = one.workers[0]._kv
    one.plan(one.slots.slice(1, 0, 6), new_requests=(new_request(1, PROMPT),))
    assert kv.device_tier[4].isnan().any(), "a block that is filled at once need not be"
    assert kv.device_tier[5, 0, 0, 0, :, 0].tolist() == [PROMPT[4], PROMPT[5], 0, 0]
    assert kv.device_tier[6].isnan().all()
    one.plan(one.slots.slice(1, 6, 1, samples=True))
    assert kv.device_tier[5, 0, 0, 0, :, 0].tolist() == [*PROMPT[4:], 0]


def test_prompt_score_that_is_no_number_is_an_error(spoil: Callable[[int], None]) -> None:
    spoil(2)
    one = coordinator()
    new = (new_request(1, PROMPT, replace(GREEDY, prompt_logprobs=0)),)
    result = one.plan(one.slots.slice(1, 0, 7, samples=True), new_requests=new)
    assert [request_id for request_id, _ in result.errors] == [1]


def test_whole_context_can_be_filled() -> None:
    prompt = [1] * (MAX_MODEL_LEN - 1)
    one = coordinator()
    assert len(one.generate(1, prompt, GREEDY, 1)) == 1


@pytest.mark.parametrize("plan_id", [0, 1, 3])
def test_plan_that_is_missing_or_comes_twice_is_refused(plan_id: int) -> None:
    worker = make_worker()
    worker.execute(IterationPlan(1))
    with pytest.raises(PlanError, match=f"plan {plan_id} follows plan 1"):
        worker.execute(IterationPlan(plan_id))
