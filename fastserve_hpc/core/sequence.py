"""A request on its way through the scheduler: the one mutable record of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastserve_hpc.core.block_keys import KeyChain
from fastserve_hpc.core.request import DEFAULT_SLOWDOWN, FinishReason, Request


@dataclass(slots=True, eq=False)
class Sequence:
    """What the scheduler knows of a request; policies read it, only the scheduler writes it.

    Positions [0, num_prompt) are the prompt, those after it the outputs. All `num_tokens` tokens are
    known; the KV of the first `num_planned` was computed or is in flight. A slice that reaches
    `num_tokens` samples the next token.
    """

    request: Request
    arrived: float
    """Seconds, on the clock that the scheduler is given."""
    outputs: list[int] = field(default_factory=list)
    num_planned: int = 0
    num_held: int = 0
    """Tokens in the workers' record, or on the way there: all, but for the last one sampled. 0: the workers do not
    know the request."""
    num_blocks: int = 0
    """Blocks in the workers' table, or on the way there. 0: the next slice must bring the whole table."""
    awaits_sample: bool = False
    """A slice that samples is in flight: what to compute next is not known yet."""
    last_plan_id: int = 0
    """The last plan with a slice of this sequence."""
    num_preemptions: int = 0
    keys: KeyChain | None = None
    """Names of its full blocks, as far as the prefix cache has needed them."""
    is_finished: bool = False
    slowdown: float = DEFAULT_SLOWDOWN
    """Of class `batch`: so many times as long may interactive requests take because of it."""
    request_id: int = field(init=False)
    num_prompt: int = field(init=False)
    num_tokens: int = field(init=False)
    min_tokens: int = field(init=False)
    max_tokens: int = field(init=False)
    """The most tokens it may generate; the front end has put a number there."""
    stop_token_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        if sampling.max_tokens is None:
            raise ValueError(f"request {self.request.request_id}: max_tokens is not resolved")
        self.request_id = self.request.request_id
        self.num_prompt = self.num_tokens = len(self.request.prompt)
        self.min_tokens = sampling.min_tokens
        self.max_tokens = sampling.max_tokens
        self.stop_token_ids = frozenset(sampling.stop_token_ids)

    @property
    def max_computed(self) -> int:
        """Positions whose KV it may need: the last token is never computed."""
        return self.num_prompt + self.max_tokens - 1

    def accept(self, token_id: int) -> FinishReason | None:
        """Take the token that was awaited; why the sequence ends with it, if it does."""
        self.outputs.append(token_id)
        self.num_tokens += 1
        self.awaits_sample = False
        num_outputs = len(self.outputs)
        if token_id in self.stop_token_ids and num_outputs > self.min_tokens:
            return "stop"
        return "length" if num_outputs >= self.max_tokens else None

    def check(self) -> None:
        """Assert the invariants."""
        assert self.num_tokens == self.num_prompt + len(self.outputs)
        assert 0 <= self.num_planned <= self.num_tokens
        assert self.num_held == 0 or self.num_prompt <= self.num_held
        assert self.num_held == 0 or self.num_tokens - 1 <= self.num_held <= self.num_tokens
        assert self.num_held == 0 or self.num_held >= self.num_planned
        assert len(self.outputs) < self.max_tokens or self.is_finished
