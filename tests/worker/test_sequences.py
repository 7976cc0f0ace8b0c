"""The mirrors of requests follow the plans' diffs exactly, and refuse what does not fit."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fastserve_hpc.core.plan import NewRequest, SequenceSlice
from fastserve_hpc.core.request import SamplingParams
from fastserve_hpc.worker.sequences import PlanError, SequenceTable

MAX_LEN, BLOCK = 20, 4


def request(request_id: int, prompt: tuple[int, ...] = (1, 2, 3)) -> NewRequest:
    return NewRequest(request_id, prompt, SamplingParams(), 0)


@pytest.fixture
def table() -> SequenceTable:
    table = SequenceTable(MAX_LEN, BLOCK, initial_rows=2)
    table.add(request(1))
    return table


def test_decode_appends_its_token_and_its_block(table: SequenceTable) -> None:
    table.apply(SequenceSlice(1, 0, 3, 0, (7,)))
    table.apply(SequenceSlice(1, 3, 1, 1, (), (50,)))
    sequence = table.apply(SequenceSlice(1, 4, 1, 1, (9,), (51,)))
    assert table.record(sequence, 5).tolist() == [1, 2, 3, 50, 51]
    assert table.blocks[sequence.row].tolist() == [7, 9, 0, 0, 0]


def test_token_sampled_here_need_not_be_sent(table: SequenceTable) -> None:
    table.append(table[1], 3, 42)
    sequence = table.apply(SequenceSlice(1, 3, 1, 0, (7,)))
    assert table.record(sequence, 4).tolist() == [1, 2, 3, 42]


def test_token_that_is_sent_again_hides_none_behind_it(table: SequenceTable) -> None:
    table.apply(SequenceSlice(1, 3, 2, 0, (7, 8), (50, 51)))
    table.apply(SequenceSlice(1, 0, 4, 2, (), (50,)))
    sequence = table.apply(SequenceSlice(1, 4, 1, 2))
    assert table.record(sequence, 5).tolist() == [1, 2, 3, 50, 51]


def test_last_token_of_a_full_context_is_not_recorded(table: SequenceTable) -> None:
    table.append(table[1], MAX_LEN, 42)
    assert table[1].num_tokens == 3


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (SequenceSlice(2, 0, 1, 0, (1,)), "request 2: not known"),
        (SequenceSlice(1, 0, 0, 0, (1,)), "positions 0..-1 is not within"),
        (SequenceSlice(1, -1, 2, 0, (1,)), "is not within the context"),
        (SequenceSlice(1, 18, 3, 0, (1, 2, 3, 4, 5, 6)), "is not within the context of 20"),
        (SequenceSlice(1, 3, 1, 0, (1,)), "only 3 tokens are known"),
        (SequenceSlice(1, 4, 1, 0, (1, 2), (5,)), "from position 4, but only 3"),
        (SequenceSlice(1, 3, 1, 0, (1,), (-1,)), "token id -1"),
        (SequenceSlice(1, 0, 3, 1, (1,)), "keeps 1 of 0 blocks"),
        (SequenceSlice(1, 0, 3, 0, (1,) * 6), "then has 6 of 5"),
        (SequenceSlice(1, 0, 3, 0, ()), "0 blocks of 4 do not hold it"),
    ],
)
def test_slice_that_does_not_fit_is_refused(table: SequenceTable, piece: SequenceSlice, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        table.apply(piece)


@pytest.mark.parametrize("prompt", [(), (1,) * (MAX_LEN + 1)])
def test_prompt_that_does_not_fit_is_refused(table: SequenceTable, prompt: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="prompt tokens"):
        table.add(request(2, prompt))


def test_request_that_comes_twice_is_refused(table: SequenceTable) -> None:
    with pytest.raises(PlanError, match="sent twice"):
        table.add(request(1))


def test_forgetting_an_unknown_request_is_nothing(table: SequenceTable) -> None:
    table.forget([99])
    assert len(table) == 1


@dataclass
class Model:
    """What the table should hold for one request."""

    tokens: list[int]
    blocks: list[int] = field(default_factory=list)


class Mirrors(RuleBasedStateMachine):
    """Random plans against plain lists; rows are reused and the table grows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SequenceTable(MAX_LEN, BLOCK, initial_rows=1)
        self.models: dict[int, Model] = {}
        self.next_id = 0

    @rule(prompt=st.lists(st.integers(0, 99), min_size=1, max_size=MAX_LEN - 1))
    def add(self, prompt: list[int]) -> None:
        self.next_id += 1
        self.table.add(request(self.next_id, tuple(prompt)))
        self.models[self.next_id] = Model(list(prompt))

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def apply(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.models)))
        model = self.models[request_id]
        new_tokens = data.draw(st.lists(st.integers(0, 99), max_size=min(2, MAX_LEN - len(model.tokens))))
        tokens = model.tokens + new_tokens
        end = len(tokens) if new_tokens else data.draw(st.integers(1, len(tokens)))
        start = data.draw(st.integers(0, end - 1))
        kept = data.draw(st.integers(0, len(model.blocks)))
        fewest = max(0, -(-end // BLOCK) - kept)
        slots = data.draw(st.lists(st.integers(1, 999), min_size=fewest, max_size=max(fewest, MAX_LEN // BLOCK - kept)))
        self.table.apply(SequenceSlice(request_id, start, end - start, kept, tuple(slots), tuple(new_tokens)))
        model.tokens, model.blocks = tokens, model.blocks[:kept] + slots

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.models)))
        self.table.forget([request_id])
        del self.models[request_id]

    @invariant()
    def table_holds_what_the_plans_said(self) -> None:
        assert len(self.table) == len(self.models)
        for request_id, model in self.models.items():
            sequence = self.table[request_id]
            assert self.table.record(sequence, sequence.num_tokens).tolist() == model.tokens
            padding = [0] * (MAX_LEN // BLOCK - len(model.blocks))
            assert self.table.blocks[sequence.row].tolist() == model.blocks + padding

    @invariant()
    def rows_belong_to_one_request_each(self) -> None:
        rows = [self.table[request_id].row for request_id in self.models]
        assert sorted(rows + self.table._free_rows) == list(range(len(self.table.tokens)))
        assert not self.table.blocks[self.table._free_rows].any()


TestMirrors = Mirrors.TestCase
TestMirrors.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
