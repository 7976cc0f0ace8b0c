"""A worker without a model: for tests of everything around the model, and the scheduler's oracle.

Its answers are readable words that depend on the prompt, the choice and the position alone, so they
must be the same however requests were batched, chunked or preempted. It keeps, for every position of
every KV block, a hash of the tokens up to there, and refuses a plan that would read anything else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count

from fastserve_hpc.core.plan import (
    BlockCopy,
    IterationPlan,
    IterationResult,
    NewRequest,
    RankReport,
    SequenceSlice,
    TokenLogprobs,
)
from fastserve_hpc.core.request import SamplingParams

EOS = 256
BOS = 257
PAD = 258
VOCAB_SIZE = 259
"""Ids 0..255 are bytes."""
MAX_ANSWER = 96
"""An answer ends by EOS after 1 to so many tokens, if nothing ends it before."""

_TEXT = (
    "about after among basin beach birch cabin cedar chalk cliff cloud coast coral crest delta drift dunes eagle "
    "earth ember fjord flint frost gleam grain grove haven heron hills ivory knoll larch light maple marsh misty "
    "moors north ocean olive patch pearl plain quiet raven ridge river shale shore slate slope south spray stone "
    "storm swift thorn tides trail vales water woods "
)
_WORD = 6
"""Characters of a word and its space."""
_MASK = 2**61 - 1


class PlanViolation(Exception):
    """A plan that a worker could not have executed rightly."""


@dataclass(slots=True)
class _Mirror:
    """What a worker knows of a request."""

    new: NewRequest
    tokens: list[int] = field(default_factory=list)
    prefixes: list[int] = field(default_factory=list)
    """For each known token a hash of all tokens up to it."""
    table: list[int] = field(default_factory=list)
    num_scored: int = 0
    """Prompt positions whose log-probabilities were reported."""

    def __post_init__(self) -> None:
        self.num_scored = min(self.new.sampling.prompt_logprobs_from, len(self.new.prompt) - 1)

    def extend(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            self.tokens.append(token_id)
            self.prefixes.append(_mix(self.prefixes[-1] if self.prefixes else 0, token_id))

    def next_token(self) -> int:
        num_prompt = len(self.new.prompt)
        seed = _mix(self.prefixes[num_prompt - 1], self.new.choice)
        return _token_at(seed, len(self.tokens) - num_prompt, self.new.sampling)


class FakeWorker:
    """Executes plans like `Worker`, in no time (or `delay_s` an iteration). Raises `PlanViolation`.

    `num_blocks` None: any slot is there. `has_result` False: a rank that is not the last stage's tp_rank 0.
    `copies_late`: a copy is done when a plan needs it, or by `do_copies`.
    """

    def __init__(
        self,
        block_size: int = 16,
        num_blocks: int | None = None,
        *,
        delay_s: float = 0.0,
        rank: int = 0,
        has_result: bool = True,
        copies_late: bool = False,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._delay_s = delay_s
        self._rank = rank
        self._has_result = has_result
        self._sleep = sleep
        self._mirrors: dict[int, _Mirror] = {}
        self._device: dict[int, list[int]] = {}
        self._host: dict[int, list[int]] = {}
        self._last_plan_id = 0
        self._copies_late = copies_late
        self._last_copy = 0
        self._copies: dict[int, tuple[BlockCopy, list[int]]] = {}
        """Those that are not done, each with the content that is to be copied."""
        self._is_shut_down = False

    @property
    def request_ids(self) -> list[int]:
        """The requests that this worker has not been told to forget."""
        return list(self._mirrors)

    def execute(self, plan: IterationPlan) -> RankReport:
        """What the rank reports; with the plan's result where it has one to give."""
        self._take_diff(plan)
        self._start_copies(plan)
        if plan.slices and self._delay_s:
            self._sleep(self._delay_s)
        result = self._compute(plan)
        return replace(self.report(), result=result if self._has_result else None)

    def report(self) -> RankReport:
        """Where this rank stands, without a result."""
        copies_done = min(self._copies, default=self._last_copy + 1) - 1
        return RankReport(self._rank, self._last_plan_id, copies_done, 2**30)

    def do_copies(self, count: int = 2**31, uploads_first: bool = True) -> None:
        """Do so many of the copies that are late. Those of one direction keep their order."""
        copies = sorted(self._copies, key=lambda n: (self._copies[n][0].to_device != uploads_first, n))
        for copy_id in copies[:count]:
            self._copy(*self._copies.pop(copy_id))

    def _take_diff(self, plan: IterationPlan) -> None:
        _require(not self._is_shut_down, f"plan {plan.plan_id} after the shutdown")
        _require(plan.plan_id == self._last_plan_id + 1, f"plan {plan.plan_id} follows plan {self._last_plan_id}")
        self._last_plan_id, self._is_shut_down = plan.plan_id, plan.shutdown
        for request_id in plan.finished:
            _require(self._mirrors.pop(request_id, None) is not None, f"request {request_id} to forget is unknown")
        for new in plan.new_requests:
            _require(new.request_id not in self._mirrors, f"request {new.request_id} was sent twice")
            self._mirrors[new.request_id] = mirror = _Mirror(new)
            mirror.extend(new.prompt)

    def _start_copies(self, plan: IterationPlan) -> None:
        for copy in plan.copies:
            _require(copy.copy_id == self._last_copy + 1, f"copy {copy.copy_id} follows copy {self._last_copy}")
            self._last_copy = copy.copy_id
            source = self._host.get(copy.host_slot) if copy.to_device else self._device.get(copy.device_slot)
            if source is None:
                raise PlanViolation(f"{copy} from a slot that was never written")
            self._copies[copy.copy_id] = (copy, list(source))
        if not self._copies_late:
            self.do_copies()
        for copy_id in [n for n, (copy, _) in self._copies.items() if copy.to_device and n <= plan.needs_copies]:
            self._copy(*self._copies.pop(copy_id))

    def _copy(self, copy: BlockCopy, content: list[int]) -> None:
        """What is there when the copy is done must be what was there when it began; positions may have been added."""
        source = self._host[copy.host_slot] if copy.to_device else self._device[copy.device_slot]
        kept = all(old in (0, new) for old, new in zip(content, source, strict=True))
        _require(kept, f"{copy}: its source was used again before it was done")
        if copy.to_device:
            self._device[copy.device_slot] = list(source)
        else:
            self._host[copy.host_slot] = list(source)

    def _compute(self, plan: IterationPlan) -> IterationResult:
        ids = [piece.request_id for piece in plan.slices]
        _require(len(ids) == len(set(ids)), f"plan {plan.plan_id} has two slices of one request")
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        scores = []
        for piece in plan.slices:
            mirror = self._mirrors.get(piece.request_id)
            if mirror is None:
                raise PlanViolation(f"request {piece.request_id} is unknown")
            self._run(mirror, piece)
            scores += _score_prompt(mirror, piece)
            if piece.samples:
                token_ids.append(mirror.next_token())
                logprobs.append(_logprobs(token_ids[-1], mirror.new.sampling.logprobs))
        wanted = tuple(logprobs) if any(logprobs) else ()
        return IterationResult(plan.plan_id, tuple(token_ids), wanted, tuple(scores), self._delay_s)

    def _run(self, mirror: _Mirror, piece: SequenceSlice) -> None:
        name = f"request {piece.request_id}, positions {piece.start}..{piece.end - 1}"
        _require(piece.num_tokens > 0, f"{name}: no tokens")
        _require(
            not piece.token_ids or piece.end - len(piece.token_ids) == len(mirror.tokens),
            f"{name}: brings {len(piece.token_ids)} tokens to {len(mirror.tokens)} known ones",
        )
        mirror.extend(piece.token_ids)
        _require(piece.end <= len(mirror.tokens), f"{name}: only {len(mirror.tokens)} tokens are known")
        _require(not piece.samples or piece.end == len(mirror.tokens), f"{name}: samples a token that is known")
        self._extend_table(mirror, piece, name)
        for slot, begin, end in self._blocks(mirror.table, piece.start):
            stored = self._device.get(slot, [])[: end - begin]
            _require(stored == mirror.prefixes[begin:end], f"{name}: slot {slot} does not hold {begin}..{end - 1}")
        self._store(mirror, piece)

    def _extend_table(self, mirror: _Mirror, piece: SequenceSlice, name: str) -> None:
        kept = piece.num_kept_blocks
        _require(0 <= kept <= len(mirror.table), f"{name}: keeps {kept} blocks of {len(mirror.table)}")
        mirror.table = table = [*mirror.table[:kept], *piece.new_slots]
        _require(len(set(table)) == len(table), f"{name}: a slot is in the table twice")
        _require(len(table) * self._block_size >= piece.end, f"{name}: {len(table)} blocks do not hold it")
        if self._num_blocks is not None:
            inside = all(0 <= slot < self._num_blocks for slot in piece.new_slots)
            _require(inside, f"{name}: slots {piece.new_slots} of {self._num_blocks}")

    def _blocks(self, table: list[int], num_tokens: int) -> Iterator[tuple[int, int, int]]:
        """(slot, first position, end) for positions below `num_tokens`."""
        for slot, begin in zip(table, range(0, num_tokens, self._block_size), strict=False):
            yield slot, begin, min(begin + self._block_size, num_tokens)

    def _store(self, mirror: _Mirror, piece: SequenceSlice) -> None:
        first_block = piece.start // self._block_size
        for slot, begin, end in list(self._blocks(mirror.table, piece.end))[first_block:]:
            page = self._device.setdefault(slot, [0] * self._block_size)
            low = max(begin, piece.start)
            page[low - begin :] = [*mirror.prefixes[low:end], *[0] * (begin + self._block_size - end)]


def answer(prompt: tuple[int, ...], sampling: SamplingParams, choice: int = 0) -> tuple[int, ...]:
    """All tokens that a request gets, whatever happens to it on the way."""
    mirror = _Mirror(NewRequest(0, prompt, sampling, choice))
    mirror.extend(prompt)
    for num_outputs in count(1):
        token_id = mirror.next_token()
        mirror.extend((token_id,))
        stops = token_id in sampling.stop_token_ids and num_outputs > sampling.min_tokens
        if stops or num_outputs == sampling.max_tokens:
            break
    return tuple(mirror.tokens[len(prompt) :])


def _token_at(seed: int, index: int, sampling: SamplingParams) -> int:
    """The answer's token number `index`: words, and an EOS somewhere."""
    word = _mix(seed, index // _WORD) % (len(_TEXT) // _WORD)
    token_id = EOS if index == 1 + seed % (MAX_ANSWER - 1) else ord(_TEXT[word * _WORD + index % _WORD])
    if index < sampling.min_tokens and token_id in sampling.stop_token_ids:
        return next(other for other in range(ord("a"), VOCAB_SIZE) if other not in sampling.stop_token_ids)
    return token_id


def _logprobs(token_id: int, num_top: int | None) -> TokenLogprobs | None:
    if num_top is None:
        return None
    return TokenLogprobs(token_id, -0.5, tuple(((token_id + i) % VOCAB_SIZE, -0.5 - i) for i in range(num_top)))


def _score_prompt(mirror: _Mirror, piece: SequenceSlice) -> list[tuple[int, tuple[TokenLogprobs | None, ...]]]:
    """The prompt log-probabilities that this slice adds; none that were reported before."""
    begin, end = mirror.num_scored, min(piece.end, len(mirror.new.prompt))
    num_top = mirror.new.sampling.prompt_logprobs
    if num_top is None or begin >= end:
        return []
    mirror.num_scored = end
    first = min(mirror.new.sampling.prompt_logprobs_from, len(mirror.new.prompt) - 1)
    scores = (_logprobs(mirror.tokens[i], num_top) if i > first else None for i in range(begin, end))
    return [(piece.request_id, tuple(scores))]


def _mix(state: int, value: int) -> int:
    state = ((state ^ (value + 1)) * 0x9E3779B97F4A7C15) & _MASK
    return state ^ (state >> 29)


def _require(holds: bool, violation: str) -> None:
    if not holds:
        raise PlanViolation(violation)
