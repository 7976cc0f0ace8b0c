"""From the last stage's logits to what the coordinator learns of an iteration."""

from __future__ import annotations

import math

import torch

from fastserve_hpc.core.plan import IterationResult, TokenLogprobs
from fastserve_hpc.worker.batch import Batch, ScoredRange
from fastserve_hpc.worker.logprobs import score_prompt
from fastserve_hpc.worker.sample_row import NO_TOKEN, SampleRow
from fastserve_hpc.worker.sampler import sample
from fastserve_hpc.worker.sequences import SequenceTable

_NOT_NUMBERS = (
    "the model's output is not a number for this prompt: its number type overflows or a weight is broken; "
    "serve with --dtype float32 to tell which"
)


class OutputReader:
    """Samples and scores. Holds what one slice of a prompt leaves to the next: the score of its first position."""

    def __init__(self, table: SequenceTable):
        self._table = table
        self._next_scores: dict[int, TokenLogprobs] = {}

    def forget(self, request_ids: tuple[int, ...]) -> None:
        for request_id in request_ids:
            self._next_scores.pop(request_id, None)

    def read(self, plan_id: int, batch: Batch, output: torch.Tensor) -> IterationResult:
        """The result for `output` of the batch's sample rows: logits [R, vocab_size], which are overwritten, or
        tokens [R].

        New tokens are noted in the table, so that a later plan may leave them out.
        """
        if output.dtype == torch.int64:
            failed = self._note(batch, token_ids := output.tolist())
            return IterationResult(plan_id, token_ids=tuple(token_ids), errors=_errors(failed))
        return self._read_logits(plan_id, batch, output)

    def _read_logits(self, plan_id: int, batch: Batch, logits: torch.Tensor) -> IterationResult:
        scores = tuple((r.sequence.request_id, self._score(r, logits)) for r in batch.scored)
        if len(batch.sampled_rows) != len(logits):
            logits = logits[torch.from_numpy(batch.sampled_rows).to(logits.device)]
        rows = [
            SampleRow(s.sampling, s.choice, s.num_prompt_tokens, self._table.record(s, position))
            for s, position in batch.sampled
        ]
        samples = sample(logits, rows) if rows else None
        token_ids = samples.token_ids if samples else []
        logprobs = samples.logprobs if samples else []
        failed = {request_id for request_id, entries in scores if any(e and math.isnan(e.logprob) for e in entries)}
        failed |= self._note(batch, token_ids)
        return IterationResult(
            plan_id,
            token_ids=tuple(token_ids),
            logprobs=tuple(logprobs) if any(logprobs) else (),
            prompt_logprobs=scores,
            errors=_errors(failed),
        )

    def _note(self, batch: Batch, token_ids: list[int]) -> set[int]:
        """Note the new tokens; the requests that got none."""
        failed = set()
        for (sequence, position), token_id in zip(batch.sampled, token_ids, strict=True):
            if token_id == NO_TOKEN:
                failed.add(sequence.request_id)
            else:
                self._table.append(sequence, position, token_id)
        return failed

    def _score(self, scored: ScoredRange, logits: torch.Tensor) -> tuple[TokenLogprobs | None, ...]:
        sequence = scored.sequence
        end_position = scored.first_position + scored.num_rows
        token_ids = self._table.record(sequence, end_position)[scored.first_position :].tolist()
        rows = logits[scored.first_row : scored.first_row + scored.num_rows]
        first = self._next_scores.pop(sequence.request_id, None)  # None for the first of all
        others = score_prompt(rows, token_ids, sequence.sampling.prompt_logprobs or 0)
        if end_position > scored.end:
            self._next_scores[sequence.request_id] = others.pop()
        return (first, *others)


def _errors(failed: set[int]) -> tuple[tuple[int, str], ...]:
    return tuple((request_id, _NOT_NUMBERS) for request_id in sorted(failed))
