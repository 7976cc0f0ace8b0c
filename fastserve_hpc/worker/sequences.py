"""What a worker knows of each request: its tokens and its block table, kept up to date by plan diffs.

Both are rows of two arrays, so that a batch of any make-up is built by a few gathers.
Every rank keeps the same mirror; nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fastserve_hpc.core.plan import NewRequest, SequenceSlice
from fastserve_hpc.core.request import SamplingParams
from fastserve_hpc.worker.greedy import takes_most_likely

IntArray = npt.NDArray[np.int32]


class PlanError(Exception):
    """A plan that does not fit what this rank knows: coordinator and worker have diverged, a bug."""


@dataclass(slots=True)
class Sequence:
    """One request as the workers see it. Its tokens and blocks lie in row `row` of the table."""

    request_id: int
    sampling: SamplingParams
    choice: int
    num_prompt_tokens: int
    row: int
    num_tokens: int
    """Tokens known: the prompt and the output so far."""
    takes_most_likely: bool = False
    """Of its parameters; see `greedy.takes_most_likely`."""
    num_blocks: int = 0
    num_scored: int = 0
    """Prompt positions whose log-probabilities have been reported or are not wanted (`SamplingParams`)."""


class SequenceTable:
    """The mirrors of all requests that the coordinator has not finished.

    `tokens` is [rows, max_model_len] int32, `blocks` [rows, max_blocks] int32 with zeros behind the
    used part. Rows are reused; memory is only touched as far as sequences reach.
    """

    def __init__(self, max_model_len: int, block_size: int, initial_rows: int = 64):
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.max_blocks = -(-max_model_len // block_size)
        self.tokens: IntArray = np.zeros((initial_rows, max_model_len), np.int32)
        self.blocks: IntArray = np.zeros((initial_rows, self.max_blocks), np.int32)
        self._sequences: dict[int, Sequence] = {}
        self._free_rows = list(range(initial_rows))[::-1]

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, request_id: int) -> Sequence:
        sequence = self._sequences.get(request_id)
        if sequence is None:
            raise PlanError(f"request {request_id}: not known to this rank, or already finished")
        return sequence

    def record(self, sequence: Sequence, end: int) -> IntArray:
        """A view of the sequence's tokens at positions [0, end)."""
        return self.tokens[sequence.row, :end]

    def add(self, new: NewRequest) -> Sequence:
        """Take a request. Raises `PlanError` where its id is in use or its prompt exceeds the context."""
        count = len(new.prompt)
        if new.request_id in self._sequences:
            raise PlanError(f"request {new.request_id}: sent twice")
        if not 0 < count <= self.max_model_len:
            raise PlanError(f"request {new.request_id}: {count} prompt tokens, context {self.max_model_len}")
        if not self._free_rows:
            self._grow()
        row = self._free_rows.pop()
        self.tokens[row, :count] = new.prompt
        sampling = new.sampling
        sequence = Sequence(
            new.request_id, sampling, new.choice, count, row, count, takes_most_likely=takes_most_likely(sampling)
        )
        sequence.num_scored = min(sampling.prompt_logprobs_from, count - 1)
        self._sequences[new.request_id] = sequence
        return sequence

    def forget(self, request_ids: Iterable[int]) -> None:
        """Drop requests; an id that never came here is ignored (it was aborted before its first slice)."""
        for request_id in request_ids:
            sequence = self._sequences.pop(request_id, None)
            if sequence is not None:
                self.blocks[sequence.row, : sequence.num_blocks] = 0
                self._free_rows.append(sequence.row)

    def apply(self, piece: SequenceSlice) -> Sequence:
        """Take a slice's new tokens and blocks; afterwards both cover its positions. Raises `PlanError`."""
        sequence = self[piece.request_id]
        if not 0 <= piece.start < piece.end <= self.max_model_len:
            raise PlanError(f"{_name(piece)} is not within the context of {self.max_model_len}")
        if piece.token_ids:
            self._write_tokens(sequence, piece.end - len(piece.token_ids), piece.token_ids, _name(piece))
        if piece.end > sequence.num_tokens:
            raise PlanError(f"{_name(piece)}: only {sequence.num_tokens} tokens are known here")
        if piece.new_slots or piece.num_kept_blocks != sequence.num_blocks:
            self._replace_blocks(sequence, piece)
        if sequence.num_blocks * self.block_size < piece.end:
            raise PlanError(f"{_name(piece)}: {sequence.num_blocks} blocks of {self.block_size} do not hold it")
        return sequence

    def append(self, sequence: Sequence, position: int, token_id: int) -> None:
        """Note a token that this rank sampled, so that a later slice need not bring it."""
        if position < self.max_model_len:
            self._write_tokens(sequence, position, (token_id,), f"request {sequence.request_id}")

    def _write_tokens(self, sequence: Sequence, start: int, token_ids: tuple[int, ...], name: str) -> None:
        if not 0 <= start <= sequence.num_tokens:
            raise PlanError(f"{name}: tokens from position {start}, but only {sequence.num_tokens} are known here")
        if min(token_ids) < 0:
            raise PlanError(f"{name}: token id {min(token_ids)}")
        end = start + len(token_ids)
        self.tokens[sequence.row, start:end] = token_ids
        sequence.num_tokens = max(sequence.num_tokens, end)

    def _replace_blocks(self, sequence: Sequence, piece: SequenceSlice) -> None:
        kept, old = piece.num_kept_blocks, sequence.num_blocks
        end = kept + len(piece.new_slots)
        if not 0 <= kept <= old or end > self.max_blocks:
            raise PlanError(f"{_name(piece)}: keeps {kept} of {old} blocks, then has {end} of {self.max_blocks}")
        self.blocks[sequence.row, kept:end] = piece.new_slots
        self.blocks[sequence.row, end:old] = 0
        sequence.num_blocks = end

    def _grow(self) -> None:
        rows = len(self.tokens)
        tokens = np.zeros((2 * rows, self.max_model_len), np.int32)
        blocks = np.zeros((2 * rows, self.max_blocks), np.int32)
        for sequence in self._sequences.values():  # copying whole rows would touch pages that nobody uses
            tokens[sequence.row, : sequence.num_tokens] = self.record(sequence, sequence.num_tokens)
            blocks[sequence.row, : sequence.num_blocks] = self.blocks[sequence.row, : sequence.num_blocks]
        self.tokens, self.blocks = tokens, blocks
        self._free_rows = list(range(rows, 2 * rows))[::-1]


def _name(piece: SequenceSlice) -> str:
    return f"request {piece.request_id}, positions {piece.start}..{piece.end - 1}"
