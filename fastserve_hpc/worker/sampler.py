"""Chooses the next token of each row of logits, by the row's own parameters alone.

Penalties, bias and masked stop ids first (`logit_edits`), then the most likely token or a draw (`draw`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fastserve_hpc.core.plan import TokenLogprobs
from fastserve_hpc.worker.draw import draw
from fastserve_hpc.worker.logit_edits import edit_logits
from fastserve_hpc.worker.logprobs import token_logprobs
from fastserve_hpc.worker.sample_row import NO_TOKEN, SampleRow


@dataclass(frozen=True, slots=True)
class Samples:
    """One entry a row. `NO_TOKEN` where the logits are not numbers, or no token is allowed."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> Samples:
    """Choose a token for each row of `logits` [len(rows), vocab_size] float32, which is overwritten."""
    wanting = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None]
    raw = torch.log_softmax(logits[wanting], dim=-1) if wanting else None
    edit_logits(logits, rows)
    token_ids = _choose(logits, rows)
    logprobs: list[TokenLogprobs | None] = [None] * len(rows)
    if raw is not None:
        chosen = [token_ids[i] for i in wanting]
        counts = [rows[i].sampling.logprobs or 0 for i in wanting]
        for i, entry in zip(wanting, token_logprobs(raw, chosen, counts), strict=True):
            logprobs[i] = None if token_ids[i] == NO_TOKEN else entry
    return Samples(token_ids, logprobs)


def _choose(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
    drawing = [i for i, row in enumerate(rows) if not row.is_greedy]
    if len(drawing) == len(rows):
        return _to_list(draw(logits, rows))
    token_ids = _most_likely(logits)
    if drawing:
        token_ids[drawing] = draw(logits[drawing], [rows[i] for i in drawing])
    return _to_list(token_ids)


def _most_likely(logits: torch.Tensor) -> torch.Tensor:
    """NaN counts as the largest; of equals, the lowest id."""
    if logits.device.type != "cpu":
        maxima, token_ids = logits.max(dim=-1)
        return token_ids.masked_fill_(~maxima.isfinite(), NO_TOKEN)
    values = logits.numpy()
    chosen = values.argmax(axis=-1)  # several times as fast as torch's
    maxima_here = values[np.arange(len(values)), chosen]
    return torch.from_numpy(np.where(np.isfinite(maxima_here), chosen, NO_TOKEN))


def _to_list(token_ids: torch.Tensor) -> list[int]:
    return [int(token_id) for token_id in token_ids.tolist()]
