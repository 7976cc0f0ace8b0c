"""Chooses the next token of each row of logits, by the row's own parameters alone.

Order: repetition, presence and frequency penalties, logit bias, stop ids masked below `min_tokens`;
then the most likely token, or temperature, top_k, top_p over what top_k left, min_p, and one draw.

A draw is the inverse of the cumulative distribution, in id order, at one counter-based random number
per (seed, choice, position). Every operation here is row by row with an order of its own, so a row's token
does not depend on its neighbours in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fastserve_hpc.core.plan import TokenLogprobs
from fastserve_hpc.core.request import SamplingParams
from fastserve_hpc.worker.logit_edits import edit_logits
from fastserve_hpc.worker.logprobs import token_logprobs
from fastserve_hpc.worker.philox import uniform
from fastserve_hpc.worker.sample_row import SampleRow

NO_TOKEN = -1


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
    maxima, token_ids = logits.max(dim=-1)  # NaN counts as the largest; of equals, the lowest id
    drawing = [i for i, row in enumerate(rows) if not row.is_greedy]
    if len(drawing) == len(rows):
        token_ids = _draw(logits, maxima, rows)
    elif drawing:
        token_ids[drawing] = _draw(logits[drawing], maxima[drawing], [rows[i] for i in drawing])
    return [int(i) for i in token_ids.masked_fill_(~maxima.isfinite(), NO_TOKEN).tolist()]


def _draw(logits: torch.Tensor, maxima: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    temperatures = _column(logits, [row.sampling.temperature or 0.0 for row in rows])
    weights = torch.softmax((logits - maxima[:, None]).div_(temperatures), dim=-1)
    _drop_unlikely(weights, [row.sampling for row in rows])
    # Summed in one order: sum() would split a lone row between threads, and round differently.
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:]
    numbers = uniform(
        [row.sampling.seed or 0 for row in rows], [row.choice for row in rows], [len(row.record) for row in rows]
    )
    target = torch.from_numpy(numbers).to(logits.device)[:, None] * total
    below_total = torch.nextafter(total, torch.zeros_like(total))  # the product may have been rounded up to it
    return torch.searchsorted(cumulative, torch.minimum(target, below_total), right=True)[:, 0]


def _drop_unlikely(weights: torch.Tensor, params: list[SamplingParams]) -> None:
    """Zero what top_k, top_p and min_p exclude. Each keeps all tokens as likely as the last one that it keeps."""
    vocab_size = weights.shape[1]
    filtering = [i for i, p in enumerate(params) if 0 < p.top_k < vocab_size or p.top_p < 1 or p.min_p > 0]
    if not filtering:
        return
    thresholds = weights.new_zeros(len(params))
    thresholds[filtering] = _thresholds(weights[filtering], [params[i] for i in filtering])
    weights.masked_fill_(weights < thresholds[:, None], 0.0)


def _thresholds(weights: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """[len(params)] the least probability that each row's filters keep, for `weights` that sum to 1."""
    vocab_size = weights.shape[1]
    top_k = torch.tensor([p.top_k if 0 < p.top_k < vocab_size else 0 for p in params], device=weights.device)[:, None]
    top_p = _column(weights, [p.top_p for p in params])
    # Tokens below (1 - top_p) / vocab_size weigh less than 1 - top_p together, so the nucleus is among the others
    # and a full sort is not needed. Half of it, to be clear of rounding.
    least = _column(weights, [0.5 * (1 - p.top_p) / vocab_size if p.top_p < 1 else np.inf for p in params])
    candidates = torch.where(top_k > 0, top_k, (weights >= least).sum(dim=-1, keepdim=True))
    last = candidates.sub_(1).clamp_(min=0)
    likeliest = weights.topk(int(last.max()) + 1, dim=-1).values
    cumulative = likeliest.cumsum(dim=-1)
    kept = torch.where(top_k > 0, cumulative.gather(1, last), 1.0)
    end = torch.minimum(torch.searchsorted(cumulative, top_p * kept), last)
    nucleus = torch.where((top_k > 0) | (top_p < 1), likeliest.gather(1, end), 0.0)
    min_p = _column(weights, [p.min_p for p in params])
    return torch.maximum(nucleus, min_p * likeliest[:, :1])[:, 0]


def _column(like: torch.Tensor, values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None]
