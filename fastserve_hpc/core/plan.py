"""The messages of the control plane: what the coordinator decides, what the ranks report.

A plan is a *diff*: ids, counts and new block slots. Workers mirror it and never decide.
All types are immutable values of the standard library, encoded by msgspec, never pickled. Those that
exist once a sequence and iteration are named tuples: 0.3 us to make, a frozen dataclass takes 0.8 us.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fastserve_hpc.core.request import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class NewRequest:
    """All a worker needs to know of a request; sent once, with or before its first slice."""

    request_id: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    choice: int


class SequenceSlice(NamedTuple):
    """Positions [start, start + num_tokens) of one request. Prefill, decode and resume are the same case.

    The worker's block table becomes `table[:num_kept_blocks] + new_slots`, then holds at least
    ceil((start + num_tokens) / block_size) slots.
    """

    request_id: int
    start: int
    num_tokens: int
    num_kept_blocks: int
    new_slots: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    """Ids the workers do not have yet (the last sample, for a decode); they end the slice's positions."""
    samples: bool = False
    """Whether the last position's logits choose a new token; False for a prompt chunk that is not the last."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


class BlockCopy(NamedTuple):
    """One KV block copied between the tiers; numbered from 1 without gaps.

    It follows the compute of earlier plans and runs beside that of later ones. Copies of both directions may
    overtake each other: no slot is in two that are in flight.
    """

    copy_id: int
    device_slot: int
    host_slot: int
    to_device: bool
    """True: upload. False: offload."""


@dataclass(frozen=True, slots=True)
class IterationPlan:
    """What every rank does next. `plan_id` counts from 1 without gaps."""

    plan_id: int
    slices: tuple[SequenceSlice, ...] = ()
    new_requests: tuple[NewRequest, ...] = ()
    finished: tuple[int, ...] = ()
    """Request ids that the workers forget before this plan's compute."""
    copies: tuple[BlockCopy, ...] = ()
    needs_copies: int = 0
    """Uploads up to this number must be done before this plan's compute."""
    shutdown: bool = False
    """Workers leave their loop after this plan."""

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.slices)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the token's own, and (id, logprob) of the most likely ones."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class IterationResult:
    """What an iteration produced, from the last stage.

    `token_ids` are aligned with the plan's slices that sample. `logprobs` likewise, empty where
    no request wants any. `prompt_logprobs` holds (request id, one entry per position of the slice,
    None for position 0 of the prompt); what a resumed request computes again is not reported again.
    """

    plan_id: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[tuple[int, tuple[TokenLogprobs | None, ...]], ...] = ()
    compute_s: float = 0.0
    """Wall seconds from the start of the first stage's compute to the sample, where known; else the last stage's."""
    errors: tuple[tuple[int, str], ...] = ()
    """(request id, what went wrong) of requests that cannot go on; their token id here, if they sample, is -1."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """A rank's word to the coordinator: acks, memory, and from the last stage's tp_rank 0 the result."""

    rank: int
    plan_id: int
    """The highest plan this rank has computed."""
    copies_done: int
    """Highest n such that copies 1..n are done."""
    free_bytes: int
    """Memory that this rank's device still has free."""
    result: IterationResult | None = None
    energy_j: float = 0.0
    """What this rank's device has used in all; 0 where that is not known."""
    stall_s: float = 0.0
    """Seconds since the start that this rank stood waiting for uploads."""


class TokenDelta(NamedTuple):
    """New tokens of one request, and at the end why it ended. What the engine streams to its front ends."""

    request_id: int
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    error: str | None = None
    """With finish_reason "error": what went wrong, for the client to read."""
    error_code: str = "internal"
    """With `error`: its kind, stable for programs (`protocol.Failed`)."""
