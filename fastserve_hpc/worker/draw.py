"""Draws tokens: temperature, top_k, top_p over what top_k left, min_p, then one number into the distribution.

A draw is the inverse of the cumulative distribution, in id order, at one counter-based random number
per (seed, choice, position). Filters are thresholds: each keeps all tokens as likely as the last one that it keeps.
Every operation works row by row with an order of its own, so a row's token depends neither on its neighbours
in the batch nor on which of the two ways below computes it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from fastserve_hpc.core.request import SamplingParams
from fastserve_hpc.worker.philox import uniform
from fastserve_hpc.worker.sample_row import NO_TOKEN, SampleRow

Floats = npt.NDArray[np.float32]

_BLOCK = 64
"""Tokens whose most likely one stands for them in the bound for top_k."""


def draw(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """[len(rows)] int64 token ids, `NO_TOKEN` where the logits are not numbers; `logits` are overwritten."""
    temperatures = _column(logits, [row.sampling.temperature or 0.0 for row in rows])
    weights = torch.softmax(logits.div_(temperatures), dim=-1)
    numbers = uniform(
        [row.sampling.seed or 0 for row in rows], [row.choice for row in rows], [len(row.record) for row in rows]
    )
    params = [row.sampling for row in rows]
    if weights.device.type == "cpu":
        return _draw_on_host(weights, params, numbers)
    return draw_all(weights, params, numbers)


def _draw_on_host(weights: torch.Tensor, params: Sequence[SamplingParams], numbers: Floats) -> torch.Tensor:
    """Like `draw_all`, but a row with filters is cut down to its few likely tokens first."""
    filters = [_filters(p, weights.shape[1]) for p in params]
    if not any(filters):
        return _invert(weights, numbers)
    token_ids = torch.empty(len(params), dtype=torch.int64)
    if others := [i for i, has_filter in enumerate(filters) if not has_filter]:
        token_ids[others] = _invert(weights[others], numbers[others])
    for i, has_filter in enumerate(filters):
        if has_filter:
            token_ids[i] = _draw_likely(weights[i].numpy(), params[i], numbers[i])
    return token_ids


def _draw_likely(weights: Floats, params: SamplingParams, number: np.float32) -> int:
    """A token of one row of probabilities, found among those that the filters may keep."""
    token_ids = np.flatnonzero(weights >= _lower_bound(weights, params))
    likely = weights[token_ids]
    if not len(likely):
        return NO_TOKEN  # nothing compares with NaN
    cumulative = _cumsum(np.where(likely >= _threshold(likely, params, len(weights)), likely, np.float32(0)))
    return int(token_ids[np.searchsorted(cumulative, number * cumulative[-1], side="right")])


def _lower_bound(weights: Floats, params: SamplingParams) -> float:
    """Something that is no more than the threshold, at the price of one pass over the row.

    k blocks have a token as likely as the k-th largest of the blocks' maxima. Tokens below (1 - top_p) / vocab_size
    weigh less than 1 - top_p together, so the nucleus is among the others; half of that is clear of rounding.
    """
    vocab_size = len(weights)
    num_blocks = vocab_size // _BLOCK
    if 0 < params.top_k < vocab_size:
        if params.top_k > num_blocks:
            return 0.0
        maxima = weights[: num_blocks * _BLOCK].reshape(_BLOCK, num_blocks).max(axis=0)
        return float(np.partition(maxima, num_blocks - params.top_k)[num_blocks - params.top_k])
    if params.top_p < 1:
        return 0.5 * (1 - params.top_p) / vocab_size
    return 0.5 * params.min_p * float(weights.max())


def _threshold(likely: Floats, params: SamplingParams, vocab_size: int) -> np.float32:
    """The least probability that the filters keep."""
    descending = np.sort(likely)[::-1]
    threshold = np.float32(0)
    limits = 0 < params.top_k < vocab_size
    if limits or params.top_p < 1:
        cumulative = _cumsum(descending[: params.top_k] if limits else descending)
        kept = cumulative[-1] if limits else np.float32(1)
        end = np.searchsorted(cumulative, np.float32(params.top_p) * kept)
        threshold = descending[min(end, len(cumulative) - 1)]
    return max(threshold, np.float32(params.min_p) * descending[0])


def _cumsum(values: Floats) -> Floats:
    return np.cumsum(values, dtype=np.float64).astype(np.float32)  # as torch does it


def draw_all(weights: torch.Tensor, params: Sequence[SamplingParams], numbers: Floats) -> torch.Tensor:
    """Draw from all rows of probabilities at once, on any device; `weights` are overwritten."""
    filtering = [i for i, p in enumerate(params) if _filters(p, weights.shape[1])]
    if filtering:
        thresholds = weights.new_zeros(len(params))
        thresholds[filtering] = _thresholds(weights[filtering], [params[i] for i in filtering])
        weights.mul_(weights >= thresholds[:, None])
    return _invert(weights, numbers)


def _invert(weights: torch.Tensor, numbers: Floats) -> torch.Tensor:
    """The token at `numbers` [rows] of each row's cumulative distribution; weights need not sum to 1."""
    # Summed in one order: sum() would split a lone row between threads, and round differently.
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:]
    # At most (1 - 2^-24) * total, which rounds to less than the total: there is a token behind it.
    target = torch.from_numpy(numbers).to(weights.device)[:, None] * total
    token_ids = torch.searchsorted(cumulative, target, right=True)
    return token_ids.masked_fill_(~total.isfinite(), NO_TOKEN)[:, 0]


def _thresholds(weights: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """[len(params)] the least probability that each row's filters keep."""
    vocab_size = weights.shape[1]
    top_k = torch.tensor([p.top_k if 0 < p.top_k < vocab_size else 0 for p in params], device=weights.device)[:, None]
    top_p = _column(weights, [p.top_p for p in params])
    bounds = _column(weights, [0.5 * (1 - p.top_p) / vocab_size if p.top_p < 1 else np.inf for p in params])
    candidates = torch.where(top_k > 0, top_k, (weights >= bounds).count_nonzero(dim=-1)[:, None])
    last = candidates.sub_(1).clamp_(min=0)
    descending = weights.topk(int(last.max()) + 1, dim=-1).values
    cumulative = descending.cumsum(dim=-1)
    kept = torch.where(top_k > 0, cumulative.gather(1, last), 1.0)
    end = torch.minimum(torch.searchsorted(cumulative, top_p * kept), last)
    nucleus = torch.where((top_k > 0) | (top_p < 1), descending.gather(1, end), 0.0)
    min_p = _column(weights, [p.min_p for p in params])
    return torch.maximum(nucleus, min_p * descending[:, :1])[:, 0]


def _filters(params: SamplingParams, vocab_size: int) -> bool:
    return 0 < params.top_k < vocab_size or params.top_p < 1 or params.min_p > 0


def _column(like: torch.Tensor, values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None]
