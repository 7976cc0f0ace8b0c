"""Batches hold what the plan says, token by token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worker.tiny import BLOCK_SIZE, MAX_MODEL_LEN, Slots, new_request

from fastserve_hpc.core.plan import IterationPlan, SequenceSlice
from fastserve_hpc.core.request import SamplingParams
from fastserve_hpc.worker.batch import Batch, BatchBuilder
from fastserve_hpc.worker.sequences import PlanError, SequenceTable

CPU = torch.device("cpu")


def table_with(prompts: dict[int, list[int]], sampling: SamplingParams | None = None) -> SequenceTable:
    table = SequenceTable(MAX_MODEL_LEN, BLOCK_SIZE, initial_rows=2)
    for request_id, prompt in prompts.items():
        table.add(new_request(request_id, prompt, sampling or SamplingParams()))
    return table


def test_prefill_chunk_and_decode_in_one_batch() -> None:
    table = table_with({1: [10, 11, 12, 13, 14], 2: [20, 21]})
    builder = BatchBuilder(table, max_tokens=16, max_seqs=4, device=CPU)
    builder.build(IterationPlan(1, (SequenceSlice(2, 0, 2, 0, (5,), samples=True),)))
    batch = builder.build(
        IterationPlan(2, (SequenceSlice(1, 0, 5, 0, (3, 7)), SequenceSlice(2, 2, 1, 1, (), (99,), samples=True)))
    )
    assert batch.token_ids.tolist() == [10, 11, 12, 13, 14, 99]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 2]
    assert batch.slot_ids.tolist() == [12, 13, 14, 15, 28, 22]
    assert batch.query_start.tolist() == [0, 5, 6]
    assert batch.query_lens.tolist() == [5, 1]
    assert batch.seq_lens.tolist() == [5, 3]
    assert batch.block_tables.tolist() == [[3, 7], [5, 0]]
    assert batch.sample_rows.tolist() == [5]
    assert (batch.num_tokens, batch.num_seqs, batch.max_query_len, batch.max_seq_len) == (6, 2, 5, 5)
    assert not batch.is_decode
    assert [(s.request_id, position) for s, position in batch.sampled] == [(2, 3)]


def test_tensors_have_the_agreed_types_and_are_contiguous() -> None:
    builder = BatchBuilder(table_with({1: [1, 2, 3, 4, 5]}), max_tokens=16, max_seqs=4, device=CPU)
    batch = builder.build(IterationPlan(1, (SequenceSlice(1, 0, 5, 0, (3, 7), samples=True),)))
    for name in ("token_ids", "positions", "slot_ids", "sample_rows"):
        assert getattr(batch, name).dtype == torch.int64, name
    for name in ("query_start", "query_lens", "seq_lens", "block_tables"):
        assert getattr(batch, name).dtype == torch.int32, name
        assert getattr(batch, name).is_contiguous(), name


def test_buffers_are_allocated_once() -> None:
    builder = BatchBuilder(table_with({1: [1, 2, 3]}), max_tokens=16, max_seqs=4, device=CPU)
    first = builder.build(IterationPlan(1, (SequenceSlice(1, 0, 3, 0, (3,)),)))
    second = builder.build(IterationPlan(2, (SequenceSlice(1, 0, 2, 1),)))
    assert first.token_ids.data_ptr() == second.token_ids.data_ptr()
    assert first.block_tables.data_ptr() == second.block_tables.data_ptr()


def test_pure_decode_is_marked() -> None:
    builder = BatchBuilder(table_with({1: [1], 2: [2]}), max_tokens=16, max_seqs=4, device=CPU)
    pieces = (SequenceSlice(1, 0, 1, 0, (1,), samples=True), SequenceSlice(2, 0, 1, 0, (2,), samples=True))
    assert builder.build(IterationPlan(1, pieces)).is_decode


def test_every_running_sequence_may_decode_even_where_the_token_budget_is_smaller() -> None:
    builder = BatchBuilder(table_with({1: [1], 2: [2]}), max_tokens=1, max_seqs=2, device=CPU)
    pieces = (SequenceSlice(1, 0, 1, 0, (1,)), SequenceSlice(2, 0, 1, 0, (2,)))
    assert builder.build(IterationPlan(1, pieces)).num_tokens == 2


@pytest.mark.parametrize(
    "pieces",
    [(), (SequenceSlice(1, 0, 5, 0, (1, 2)),), tuple(SequenceSlice(1, 0, 1, 0, (1,)) for _ in range(3))],
    ids=["no slice", "too many tokens", "too many sequences"],
)
def test_plan_beyond_the_limits_is_refused(pieces: tuple[SequenceSlice, ...]) -> None:
    builder = BatchBuilder(table_with({1: [1] * 5}), max_tokens=4, max_seqs=2, device=CPU)
    with pytest.raises(PlanError, match="plan 3: "):
        builder.build(IterationPlan(3, pieces))


def assert_same(batch: Batch, prompts: dict[int, list[int]], slots: Slots, pieces: list[SequenceSlice]) -> None:
    """Compare with a token-by-token rendering of the slices."""
    places = [(p.request_id, position) for p in pieces for position in range(p.start, p.end)]
    assert batch.token_ids.tolist() == [prompts[r][position] for r, position in places]
    assert batch.positions.tolist() == [position for _, position in places]
    assert batch.slot_ids.tolist() == [
        slots.held[r][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE for r, position in places
    ]
    lens = [p.num_tokens for p in pieces]
    assert batch.query_lens.tolist() == lens
    assert batch.query_start.tolist() == [sum(lens[:i]) for i in range(len(lens) + 1)]
    assert batch.seq_lens.tolist() == [p.end for p in pieces]
    width = -(-max(p.end for p in pieces) // BLOCK_SIZE)
    assert batch.block_tables.tolist() == [(slots.held[p.request_id] + [0] * width)[:width] for p in pieces]
    ends = np.cumsum(lens) - 1
    assert batch.sample_rows.tolist() == [int(end) for end, p in zip(ends, pieces, strict=True) if p.samples]
    assert batch.sampled_rows.tolist() == list(range(len(batch.sample_rows)))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_mix_of_slices_is_rendered_exactly(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, MAX_MODEL_LEN), min_size=1, max_size=6))
    prompts = {i: [100 * i + j for j in range(length)] for i, length in enumerate(lengths)}
    slots = Slots(data.draw(st.permutations(range(16 * 6))))
    builder = BatchBuilder(table_with(prompts), max_tokens=6 * MAX_MODEL_LEN, max_seqs=6, device=CPU)
    for plan_id in range(1, 4):
        chosen = data.draw(st.lists(st.sampled_from(sorted(prompts)), min_size=1, unique=True))
        pieces = []
        for request_id in chosen:
            start = data.draw(st.integers(0, lengths[request_id] - 1))
            num_tokens = data.draw(st.integers(1, lengths[request_id] - start))
            pieces.append(slots.slice(request_id, start, num_tokens, samples=data.draw(st.booleans())))
        assert_same(builder.build(IterationPlan(plan_id, tuple(pieces))), prompts, slots, pieces)


def test_rows_that_score_a_prompt_are_asked_for_beside_those_that_sample() -> None:
    table = table_with({1: [1, 2, 3, 4]}, SamplingParams(prompt_logprobs=0))
    table.add(new_request(2, [5, 6]))
    builder = BatchBuilder(table, max_tokens=16, max_seqs=4, device=CPU)
    batch = builder.build(
        IterationPlan(1, (SequenceSlice(2, 0, 2, 0, (1,), samples=True), SequenceSlice(1, 0, 4, 0, (2,), samples=True)))
    )
    assert batch.sample_rows.tolist() == [1, 2, 3, 4, 5]
    assert batch.sampled_rows.tolist() == [0, 4]
    (scored,) = batch.scored
    assert (scored.first_row, scored.first_position, scored.num_rows, scored.end) == (1, 1, 3, 4)


def test_prompt_that_would_be_scored_with_a_gap_is_refused() -> None:
    builder = BatchBuilder(
        table_with({1: [1, 2, 3, 4]}, replace(SamplingParams(), prompt_logprobs=1)),
        max_tokens=16,
        max_seqs=4,
        device=CPU,
    )
    with pytest.raises(PlanError, match="prompt_logprobs need 0 first"):
        builder.build(IterationPlan(1, (SequenceSlice(1, 2, 2, 0, (1,)),)))


PLAIN = SamplingParams(temperature=0.0, seed=0, max_tokens=5)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (PLAIN, True),
        (replace(PLAIN, temperature=None), True),
        (replace(PLAIN, temperature=0.7, top_k=1), True),
        (replace(PLAIN, stop_token_ids=(2,)), True),
        (replace(PLAIN, temperature=0.7), False),
        (replace(PLAIN, logprobs=0), False),
        (replace(PLAIN, prompt_logprobs=0), False),
        (replace(PLAIN, repetition_penalty=1.1), False),
        (replace(PLAIN, presence_penalty=0.1), False),
        (replace(PLAIN, frequency_penalty=-0.1), False),
        (replace(PLAIN, logit_bias={3: 1.0}), False),
        (replace(PLAIN, min_tokens=1, stop_token_ids=(2,)), False),
    ],
)
def test_batch_whose_requests_only_want_the_most_likely_token(sampling: SamplingParams, expected: bool) -> None:
    builder = BatchBuilder(table_with({1: [1, 2]}, sampling), max_tokens=16, max_seqs=4, device=CPU)
    sampling_slice = SequenceSlice(1, 0, 2, 0, (1,), samples=True)
    assert builder.build(IterationPlan(1, (sampling_slice,))).takes_most_likely == expected
    assert not builder.build(IterationPlan(2, (SequenceSlice(1, 0, 2, 1),))).takes_most_likely  # nobody samples
