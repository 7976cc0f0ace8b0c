"""What sampling means, one row at a time in plain float64: the oracle of the vectorised sampler."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from fastserve_hpc.core.request import SamplingParams


def edited(logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
    """The logits after penalties, bias and min_tokens."""
    result = np.array(logits, np.float64)
    for token_id in {*prompt, *output}:
        factor = 1 / params.repetition_penalty if result[token_id] > 0 else params.repetition_penalty
        result[token_id] *= factor
    for token_id, count in Counter(output).items():
        result[token_id] -= params.presence_penalty + count * params.frequency_penalty
    for token_id, bias in params.logit_bias.items():
        result[token_id] += bias
    if len(output) < params.min_tokens:
        result[list(params.stop_token_ids)] = -math.inf
    return result


def distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities after temperature, top_k, top_p over what top_k left, and min_p; equals stay together."""
    assert params.temperature
    scaled = (logits - logits.max()) / params.temperature
    weights = np.exp(scaled)
    weights /= weights.sum()
    descending = np.sort(weights)[::-1]
    least = params.min_p * descending[0]
    top_k = params.top_k or len(weights)
    if top_k < len(weights) or params.top_p < 1:
        best = descending[:top_k]
        cumulative = np.cumsum(best)
        num_kept = int(np.argmax(cumulative >= params.top_p * cumulative[-1] * (1 - 1e-12))) + 1
        least = max(least, best[num_kept - 1])
    weights = np.where(weights >= least, weights, 0.0)
    probabilities: np.ndarray = weights / weights.sum()
    return probabilities


def drawn(probabilities: np.ndarray, number: float) -> set[int]:
    """The token at `number` of the cumulative distribution in id order; its neighbours too, near a boundary."""
    cumulative = np.cumsum(probabilities)
    near = {int(np.searchsorted(cumulative, number + shift, side="right")) for shift in (-1e-5, 0.0, 1e-5)}
    return {min(token_id, len(probabilities) - 1) for token_id in near}
