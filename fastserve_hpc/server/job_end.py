"""The end of the Slurm job: when a server stops taking requests, and which ones it cannot finish any more."""

from __future__ import annotations

from dataclasses import dataclass

from fastserve_hpc.core.cost import CostModel
from fastserve_hpc.core.request import Request
from fastserve_hpc.errors import RequestError

TOO_LATE = "job_ending"
"""Error code of a refusal because of the time that is left: shorter work may still be done."""
_MARGIN_S = 5.0
_SHARE = 0.25
"""The most of the time that is left at the start that is given to the end."""
_LEAST_TOKENS = 16
"""An answer of unknown length is taken to be so long: refused is only what cannot be finished."""
_LEAST_OBSERVED = 64
"""Iterations before which nothing is foretold."""


@dataclass(frozen=True, slots=True)
class JobEnd:
    """All times are those of the coordinator's clock."""

    at: float
    drain_at: float
    """When to take no more, so that what runs is finished by the end."""
    cost: CostModel

    @classmethod
    def after(cls, left_s: float, now: float, drain_s: float, cost: CostModel) -> JobEnd:
        """The job ends in `left_s`; a drain may take `drain_s`."""
        reserved = min(drain_s + _MARGIN_S, _SHARE * max(left_s, 0.0))
        return cls(now + left_s, now + left_s - reserved, cost)

    def check(self, request: Request, now: float) -> None:
        """Raise `RequestError` for a request that would not be finished even if it ran alone."""
        if self.cost.num_observed < _LEAST_OBSERVED:
            return
        left_s, tokens = self.at - now, _least_tokens(request)
        costs = self.cost.costs
        needed_s = costs.prefill_s(0, len(request.prompt)) + tokens * costs.output_token_s(batch=1)
        if needed_s > left_s:
            raise RequestError(
                f"the server's Slurm job ends in {max(left_s, 0):.0f} s, and {len(request.prompt)} tokens of prompt "
                f"and {tokens} of answer take {needed_s:.0f} s at least: ask for fewer, or another server",
                code=TOO_LATE,
            )


def _least_tokens(request: Request) -> int:
    """That it will have: all, where nothing can end it early."""
    sampling = request.sampling
    longest = sampling.max_tokens or _LEAST_TOKENS
    if not sampling.stop_token_ids and not sampling.stop:
        return longest
    return min(longest, max(sampling.min_tokens, _LEAST_TOKENS))
