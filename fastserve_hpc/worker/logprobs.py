"""Log-probabilities for clients: a token's own, and the most likely ones at its position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from fastserve_hpc.core.plan import TokenLogprobs

Top = tuple[tuple[int, float], ...]

_ROWS_AT_ONCE = 64
"""Bounds the memory for a long prompt: a row is a whole vocabulary."""


def score_prompt(logits: torch.Tensor, token_ids: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Score the tokens that followed each row of raw `logits` [len(token_ids), vocab_size], with the top `count`.

    A row that is not numbers gives NaN.
    """
    entries: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), _ROWS_AT_ONCE):
        chunk = torch.log_softmax(logits[start : start + _ROWS_AT_ONCE], dim=-1)
        entries += token_logprobs(chunk, token_ids[start : start + len(chunk)], [count] * len(chunk))
    return entries


def token_logprobs(logprobs: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Row i's entry for `token_ids[i]`, with its `counts[i]` most likely tokens; of equals, lower ids first."""
    index = torch.tensor(token_ids, dtype=torch.int64, device=logprobs.device).clamp_(min=0)
    own = logprobs.gather(1, index[:, None])[:, 0].tolist()
    return [
        TokenLogprobs(token_id, logprob, top)
        for token_id, logprob, top in zip(token_ids, own, _most_likely(logprobs, counts), strict=True)
    ]


def _most_likely(logprobs: torch.Tensor, counts: Sequence[int]) -> Iterator[Top]:
    largest = max(counts, default=0)
    if largest == 0:
        yield from (() for _ in counts)
        return
    # One more than asked for shows whether equals go on behind the last one, of which topk may take any.
    values, ids = (part.cpu().numpy() for part in logprobs.topk(min(largest + 1, logprobs.shape[1]), dim=-1))
    order = np.lexsort((ids, -values))
    values, ids = np.take_along_axis(values, order, -1), np.take_along_axis(ids, order, -1)
    for i, count in enumerate(counts):
        if 0 < count < len(values[i]) and values[i, count - 1] == values[i, -1]:
            yield _with_lowest_ids(logprobs[i], count, values[i, -1])
        else:
            yield tuple(zip(ids[i, :count].tolist(), values[i, :count].tolist(), strict=True))


def _with_lowest_ids(logprobs: torch.Tensor, count: int, smallest: float) -> Top:
    """The `count` most likely tokens of one position, all at least as likely as `smallest`."""
    ids = (logprobs >= smallest).nonzero()[:, 0]
    values = logprobs[ids].cpu().numpy()
    best = np.argsort(-values, kind="stable")[:count]
    return tuple(zip(ids.cpu().numpy()[best].tolist(), values[best].tolist(), strict=True))
