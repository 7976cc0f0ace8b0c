"""Changes to logits that depend on a request's tokens: penalties, bias, stop ids that may not come yet.

All are scattered to the few tokens concerned; rows without them cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from fastserve_hpc.worker.sample_row import SampleRow

Tokens = npt.NDArray[np.integer]
Edit = tuple[int, Tokens, float]  # row, token ids, parameter


def edit_logits(logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """Apply every row's penalties, logit bias and min_tokens to `logits` [len(rows), vocab_size], in place."""
    if not any(map(_has_edits, rows)):  # mostly, and each look at all rows costs a little
        return
    _penalise_repetition(logits, rows)
    _penalise_presence(logits, rows)
    _penalise_frequency(logits, rows)
    _bias(logits, rows)
    _forbid_early_stop(logits, rows)


def _has_edits(row: SampleRow) -> bool:
    params = row.sampling
    penalised = params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    return penalised or bool(params.logit_bias) or _is_early(row)


def _is_early(row: SampleRow) -> bool:
    return bool(row.sampling.stop_token_ids) and len(row.output) < row.sampling.min_tokens


def _penalise_repetition(logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """Divide the positive logits, multiply the negative ones, of all tokens in prompt and output."""
    edits = [(i, r.record, p) for i, r in enumerate(rows) if (p := r.sampling.repetition_penalty) != 1.0]
    if edits:
        index, penalty = _flatten(logits, edits)
        seen = logits[index]
        logits[index] = torch.where(seen > 0, seen / penalty, seen * penalty)  # repeats write the same value


def _penalise_presence(logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """Subtract the penalty once from each token of the output."""
    edits = [(i, r.output, p) for i, r in enumerate(rows) if (p := r.sampling.presence_penalty) != 0.0]
    if edits:
        index, penalty = _flatten(logits, edits)
        logits[index] = logits[index] - penalty


def _penalise_frequency(logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """Subtract the penalty from each token of the output as often as it occurs there."""
    edits = [(i, r.output, p) for i, r in enumerate(rows) if (p := r.sampling.frequency_penalty) != 0.0]
    if edits:
        index, penalty = _flatten(logits, edits)
        logits.index_put_(index, -penalty, accumulate=True)


def _bias(logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    edits = [
        (i, np.array([token_id]), bias) for i, r in enumerate(rows) for token_id, bias in r.sampling.logit_bias.items()
    ]
    if edits:
        index, bias = _flatten(logits, edits)
        logits[index] = logits[index] + bias


def _forbid_early_stop(logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    edits = [(i, np.array(r.sampling.stop_token_ids, np.int64), -np.inf) for i, r in enumerate(rows) if _is_early(r)]
    if edits:
        index, lowest = _flatten(logits, edits)
        logits[index] = lowest


def _flatten(logits: torch.Tensor, edits: Iterable[Edit]) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """An index of all (row, token) pairs, and each pair's parameter."""
    rows, tokens, values = zip(*edits, strict=True)
    lengths = [len(ids) for ids in tokens]
    flat_rows = torch.from_numpy(np.repeat(np.array(rows, np.int64), lengths))
    flat_tokens = torch.from_numpy(np.concatenate(tokens).astype(np.int64))
    flat_values = torch.from_numpy(np.repeat(np.array(values, np.float32), lengths))
    device = logits.device
    return (flat_rows.to(device), flat_tokens.to(device)), flat_values.to(device)
