"""Log-probabilities for clients: a token's own, and the most likely ones at its position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from fastserve_hpc.core.plan import TokenLogprobs

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


def _most_likely(logprobs: torch.Tensor, counts: Sequence[int]) -> Iterator[tuple[tuple[int, float], ...]]:
    largest = min(max(counts, default=0), logprobs.shape[1])
    if largest == 0:
        yield from (() for _ in counts)
        return
    # topk alone may pick any of several equals at its end.
    at_least = logprobs >= logprobs.topk(largest, dim=-1).values[:, -1:]
    rows, ids = (part.cpu().numpy() for part in at_least.nonzero(as_tuple=True))
    values = logprobs[at_least].cpu().numpy()
    order = np.lexsort((ids, -values, rows))
    starts = np.searchsorted(rows, np.arange(len(counts)))  # rows come in ascending order
    for start, end, count in zip(starts, [*starts[1:], len(rows)], counts, strict=True):
        best = order[start : min(start + count, end)]
        yield tuple(zip(ids[best].tolist(), values[best].tolist(), strict=True))
