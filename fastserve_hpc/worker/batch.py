"""An iteration plan as tensors: what the model computes on."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fastserve_hpc.core.plan import IterationPlan, SequenceSlice
from fastserve_hpc.worker.sequences import PlanError, Sequence, SequenceTable

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ScoredRange:
    """Rows of the logits that score a prompt: row `first_row + i` predicts position `first_position + i`."""

    sequence: Sequence
    end: int
    """End of the slice: positions below it are reported, if any is new."""
    first_row: int
    first_position: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of S sequences, in the order of the plan's slices; R of them need logits.

    The tensors are views of buffers that the next `build` overwrites.
    """

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slot_ids: torch.Tensor  # [T] int64: block slot * block_size + offset, where k and v are stored
    query_start: torch.Tensor  # [S + 1] int32: sequence i has tokens query_start[i]..query_start[i + 1]
    query_lens: torch.Tensor  # [S] int32
    seq_lens: torch.Tensor  # [S] int32: context length, including this slice
    block_tables: torch.Tensor  # [S, max_blocks] int32, padded with 0; max_blocks covers max_seq_len
    sample_rows: torch.Tensor  # [R] int64, ascending
    num_tokens: int
    num_seqs: int
    max_query_len: int
    max_seq_len: int
    is_decode: bool
    """Every slice has one token."""
    sampled: tuple[tuple[Sequence, int], ...]
    """(sequence, position of the new token) of each slice that samples, in the plan's order."""
    sampled_rows: Int64Array
    """Where their logits lie among the R rows."""
    scored: tuple[ScoredRange, ...]
    """Prompt positions to be scored."""
    begun_blocks: tuple[int, ...] = ()
    """Slots of blocks that this iteration begins and does not fill. Attention multiplies what lies behind a sequence's
    end by 0: what an earlier owner has left there must not be, since it may be no number."""
    takes_most_likely: bool = False
    """Every one of the R rows, and there are some, wants its most likely token and nothing else."""


class _Buffer:
    """A numpy array that is filled on the host, and the tensor that the model reads."""

    def __init__(self, capacity: int, dtype: npt.DTypeLike, device: torch.device):
        self.array: npt.NDArray[Any] = np.zeros(capacity, dtype)
        self._host = torch.from_numpy(self.array)
        self._tensor = self._host if device.type == "cpu" else self._host.to(device)

    def put(self, values: npt.NDArray[Any]) -> torch.Tensor:
        """A view of the tensor holding `values` (any shape)."""
        count = values.size
        self.array[:count] = values.reshape(-1)
        if self._tensor is not self._host:
            self._tensor[:count].copy_(self._host[:count])
        return self._tensor[:count].view(values.shape)


class BatchBuilder:
    """Turns plans into batches. `max_tokens` and `max_seqs` bound an iteration; buffers are made once for them."""

    def __init__(self, table: SequenceTable, max_tokens: int, max_seqs: int, device: torch.device):
        self._table = table
        self._max_tokens = max(max_tokens, max_seqs)  # a decode of every sequence must fit
        self._max_seqs = max_seqs
        self._token_ids, self._positions, self._slot_ids, self._sample_rows = (
            _Buffer(self._max_tokens, np.int64, device) for _ in range(4)
        )
        self._query_start, self._query_lens, self._seq_lens = (
            _Buffer(max_seqs + 1, np.int32, device) for _ in range(3)
        )
        self._block_tables = _Buffer(max_seqs * table.max_blocks, np.int32, device)

    def build(self, plan: IterationPlan) -> Batch:
        """The batch of a plan with at least one slice; the table takes in the plan's diffs.

        Raises `PlanError` where the plan exceeds the limits or does not fit what this rank knows.
        """
        slices = plan.slices
        self._check(plan)
        sequences = [self._table.apply(piece) for piece in slices]
        rows = np.array([sequence.row for sequence in sequences], np.int64)
        lens = np.array([piece.num_tokens for piece in slices], np.int64)
        starts = np.array([piece.start for piece in slices], np.int64)
        ends = starts + lens
        query_start = np.zeros(len(slices) + 1, np.int64)
        np.cumsum(lens, out=query_start[1:])

        token_rows = np.repeat(rows, lens)
        positions = np.arange(len(token_rows)) + np.repeat(starts - query_start[:-1], lens)
        block, offset = np.divmod(positions, self._table.block_size)
        slots = self._table.blocks[token_rows, block].astype(np.int64)
        max_seq_len = int(ends.max())
        width = -(-max_seq_len // self._table.block_size)
        sample_rows, sampled_rows, scored = _logit_rows(slices, sequences, query_start)
        sampled = tuple((s, piece.end) for s, piece in zip(sequences, slices, strict=True) if piece.samples)
        return Batch(
            token_ids=self._token_ids.put(self._table.tokens[token_rows, positions]),
            positions=self._positions.put(positions),
            slot_ids=self._slot_ids.put(slots * self._table.block_size + offset),
            query_start=self._query_start.put(query_start),
            query_lens=self._query_lens.put(lens),
            seq_lens=self._seq_lens.put(ends),
            block_tables=self._block_tables.put(self._table.blocks[rows, :width]),
            sample_rows=self._sample_rows.put(sample_rows),
            num_tokens=len(token_rows),
            num_seqs=len(slices),
            max_query_len=int(lens.max()),
            max_seq_len=max_seq_len,
            is_decode=len(token_rows) == len(slices),
            sampled=sampled,
            sampled_rows=sampled_rows,
            scored=scored,
            begun_blocks=self._begun_blocks(rows, starts, ends),
            takes_most_likely=bool(sampled) and not scored and all(s.takes_most_likely for s, _ in sampled),
        )

    def _begun_blocks(self, rows: Int64Array, starts: Int64Array, ends: Int64Array) -> tuple[int, ...]:
        last, num_filled = np.divmod(ends, self._table.block_size)
        is_begun = (num_filled > 0) & (ends - num_filled >= starts)
        return tuple(self._table.blocks[rows[is_begun], last[is_begun]].tolist())

    def _check(self, plan: IterationPlan) -> None:
        if not plan.slices or plan.num_tokens > self._max_tokens or len(plan.slices) > self._max_seqs:
            raise PlanError(
                f"plan {plan.plan_id}: {plan.num_tokens} tokens of {len(plan.slices)} sequences; "
                f"an iteration has 1 to {self._max_tokens} of up to {self._max_seqs}"
            )


def _logit_rows(
    slices: Items[SequenceSlice], sequences: Items[Sequence], query_start: Int64Array
) -> tuple[Int64Array, Int64Array, tuple[ScoredRange, ...]]:
    """The batch rows whose logits are needed; which of these sample; which score a prompt."""
    samples = np.array([piece.samples for piece in slices], bool)
    last = query_start[1:] - 1
    if all(sequence.sampling.prompt_logprobs is None for sequence in sequences):
        return last[samples], np.arange(int(samples.sum())), ()
    rows: list[Int64Array] = []
    sampled_rows: list[int] = []
    scored: list[ScoredRange] = []
    num_rows = 0
    for i, (piece, sequence) in enumerate(zip(slices, sequences, strict=True)):
        scored_range = _scored_range(piece, sequence, num_rows)
        if scored_range is not None:
            scored.append(scored_range)
            first = query_start[i] + scored_range.first_position - 1 - piece.start
            rows.append(np.arange(first, first + scored_range.num_rows))
            num_rows += scored_range.num_rows
        if piece.samples:
            rows.append(last[i : i + 1])
            sampled_rows.append(num_rows)
            num_rows += 1
    joined = np.concatenate(rows) if rows else np.zeros(0, np.int64)
    return joined, np.array(sampled_rows, np.int64), tuple(scored)


def _scored_range(piece: SequenceSlice, sequence: Sequence, first_row: int) -> ScoredRange | None:
    """What this slice adds to the prompt's log-probabilities; None where it adds nothing.

    The logits at position p score p + 1, so the entry of a slice's first position comes from the
    slice before: whoever takes the scores keeps one back. What a resumed request computes again
    is not scored again.
    """
    end = min(piece.end, sequence.num_prompt_tokens)
    done = sequence.num_scored
    if sequence.sampling.prompt_logprobs is None or end <= done:
        return None
    if piece.start > done:
        raise PlanError(f"request {piece.request_id}: starts at {piece.start}, but prompt_logprobs need {done} first")
    sequence.num_scored = end
    num_rows = min(end, sequence.num_prompt_tokens - 1) - done
    return ScoredRange(sequence, end, first_row, done + 1, num_rows)
