"""Which requests choose their tokens without chance, and for which of them the model may do it."""

from __future__ import annotations

from fastserve_hpc.core.request import SamplingParams

_GREEDY_BELOW = 1e-5
"""A lower temperature would only turn the rounding errors of the logits into choices."""


def is_greedy(sampling: SamplingParams) -> bool:
    return (sampling.temperature or 0.0) < _GREEDY_BELOW or sampling.top_k == 1


def takes_most_likely(sampling: SamplingParams) -> bool:
    """Whether each token is simply the most likely one: nothing edits the logits and nobody wants to see them."""
    return (
        is_greedy(sampling)
        and sampling.logprobs is None
        and sampling.prompt_logprobs is None
        and sampling.repetition_penalty == 1.0
        and sampling.presence_penalty == 0.0
        and sampling.frequency_penalty == 0.0
        and not sampling.logit_bias
        and not (sampling.min_tokens and sampling.stop_token_ids)
    )
