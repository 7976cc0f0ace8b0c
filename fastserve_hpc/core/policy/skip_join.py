"""Skip-join MLFQ over output tokens: short answers first, never much worse than order of arrival.

docs/scheduling.md explains each rule and says what it brings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

from fastserve_hpc.core.cost import CostModel
from fastserve_hpc.core.hints import HintTrust
from fastserve_hpc.core.lengths import FinishedLengths
from fastserve_hpc.core.policy.base import OrderKey
from fastserve_hpc.core.policy.levels import Levels
from fastserve_hpc.core.policy.waiting import Entry, Waiting
from fastserve_hpc.core.sequence import Sequence

_BATCH_CLASS = 1000.0
"""Added to the levels of the service class `batch`: behind everyone else."""
_MAX_VICTIMS = 8
_PINNED = -1.0
"""The level of those whom nobody may replace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipJoinRules:
    """The rules and their numbers; each can be switched off."""

    quantum: int = 16
    """Output tokens of level 0; each level has twice as many as the one before."""
    joins_by_prompt: bool = True
    """New requests skip levels by the cost of their prompt; else they join as if they had none."""
    sinks_prompt: bool = True
    """Once the prompt is computed it no longer counts; else the level stays that of the arrival."""
    replaces: bool = True
    """Waiting requests may take the place of running ones."""
    min_gap: float = 1.0
    """Levels by which a candidate must be better than the one that it replaces."""
    spared_levels: float = 1.0
    """Nobody is replaced before it is so many levels past that of a usual answer."""
    spares_finishing: bool = True
    """Nobody is replaced who, as recent answers go, is as near to its end as the candidate."""
    min_saving: float = 1.0
    min_finished: int = 32
    """Answers that must be known before anyone is replaced."""
    aging: float = 0.6
    """A request that has waited for this part of the time to drain the backlog goes first; infinite: never."""
    oldest_share: float = 0.05
    """The part of all work that goes to the oldest waiting requests, whatever their levels."""
    uses_hints: bool = True
    """Hints of the output length count, while they have been right."""
    hinted_ratio: float = 1.5
    """Between levels of requests with a trusted hint."""


class SkipJoin:
    """Multi-level feedback queues; a level stands for the output tokens that a request may take."""

    name = "skip-join"

    def __init__(self, max_batch: int, cost: CostModel, rules: SkipJoinRules | None = None):
        self.rules = rules or SkipJoinRules()
        self.num_replaced = 0
        """Running requests that had to give their place to another."""
        self.num_aged = 0
        self.num_pinned = 0
        self._max_batch = max_batch
        self._cost = cost
        self._lengths = FinishedLengths()
        self._hints = HintTrust()
        self._entries: dict[int, Entry] = {}
        self._waiting = Waiting()
        self._running = 0
        self._decoding = Levels()
        self._prefilling = Levels()
        self._pinned: dict[int, Entry] = {}
        self._sessions: dict[str, list[int]] = {}
        """By name: [live requests, tokens they were given since there was none]."""
        self._num_added = 0
        self._order = 0
        self._prompt_tokens_left = 0
        self._credit = 0.0
        """Output tokens' worth of work that is owed to the oldest."""
        self._work = 0.0
        """Done since the last look, likewise."""

    # What the scheduler tells.

    def add(self, sequence: Sequence, now: float) -> None:
        self._num_added += 1
        entry = Entry(sequence, self._num_added, now, prompt_left=sequence.num_prompt)
        self._entries[sequence.request_id] = entry
        self._prompt_tokens_left += entry.prompt_left
        session = sequence.request.session
        if session is not None:
            entry.session = self._sessions.setdefault(session, [0, 0])
            entry.session[0] += 1
        self._set_level(entry)
        self._waiting.put(entry)

    def remove(self, sequence: Sequence, is_complete: bool) -> None:
        entry = self._entries.pop(sequence.request_id)
        if entry.is_running:
            self._leave(entry)
        else:
            self._waiting.take_out(entry)
        self._pinned.pop(sequence.request_id, None)
        self._prompt_tokens_left -= entry.prompt_left
        if entry.session is not None:
            self._leave_session(entry.session, sequence)
        if is_complete:
            self._learn(sequence)

    def on_progress(self, sequence: Sequence, num_tokens: int, now: float) -> None:  # noqa: ARG002
        entry = self._entries[sequence.request_id]
        self._work += num_tokens
        if len(sequence.outputs) >= entry.limit:
            self._look_at(entry, num_tokens)

    def _look_at(self, entry: Entry, num_tokens: int) -> None:
        """What `on_progress` need not do for every token of every sequence."""
        if entry.prompt_left:
            self._compute_prompt(entry, num_tokens)
        elif entry.session is not None:
            entry.session[1] += num_tokens
        if entry.is_pinned:
            self._credit -= 1
        if not entry.prompt_left and self._outputs(entry) >= entry.end:
            self._relevel(entry)

    def _compute_prompt(self, entry: Entry, num_tokens: int) -> None:
        done = min(num_tokens, entry.prompt_left)
        prompt_ratio = self._prompt_ratio()
        self._work += done * (prompt_ratio - 1)
        if entry.is_pinned:
            self._credit -= done * prompt_ratio
        entry.prompt_left -= done
        self._prompt_tokens_left -= done

    # The order.

    def ranked(self, now: float) -> Iterator[Sequence]:
        self._select(now)
        yield from self._decoding
        yield from self._prefilling
        for entry in self._waiting.ordered():
            yield entry.sequence

    def order_key(self, sequence: Sequence) -> OrderKey:
        entry = self._entries[sequence.request_id]
        if not entry.is_running:
            return (2.0, *entry.wait_key)
        return (float(entry.is_prefilling), entry.place, float(entry.order))

    def _select(self, now: float) -> None:
        """Choose who holds the places of the batch."""
        if self._waiting.is_empty:
            self._work = 0.0
            return
        self._age(now)
        self._pin_oldest()
        while (entry := self._waiting.first()) is not None and self._running < self._max_batch:
            self._start(entry)
        while (entry := self._waiting.first()) is not None and entry.is_pinned:
            self._make_way(entry)
        self._replace()

    def _make_way(self, pinned: Entry) -> None:
        """A pinned request takes the place of the worst. There are far fewer pinned ones than places."""
        victim = self._worst_running()
        if victim is not None:
            self._stop(victim)
        self._start(pinned)

    def _replace(self) -> None:
        """Waiting requests take the places of running ones that are much worse."""
        rules, lengths = self.rules, self._lengths
        if not rules.replaces:
            return
        spared = self._level_of(lengths.harmonic) + rules.spared_levels
        while (candidate := self._waiting.best()) is not None:
            victim = self._victim_of(candidate, max(spared, candidate.level + rules.min_gap))
            if victim is None:
                return
            self._stop(victim)
            self._start(candidate)

    def _victim_of(self, candidate: Entry, level: float) -> Entry | None:
        """The worst running request of at least this level that is worth replacing, of the first few."""
        for sequence in islice(chain(reversed(self._prefilling), reversed(self._decoding)), _MAX_VICTIMS):
            victim = self._entries[sequence.request_id]
            if victim.place < level:
                continue
            if victim.level >= _BATCH_CLASS or self._is_worth_it(candidate, victim):
                return victim
        return None

    def _is_worth_it(self, candidate: Entry, victim: Entry) -> bool:
        """Whether, as far as recent answers tell, the candidate has much less before it."""
        rules, lengths = self.rules, self._lengths
        if lengths.num_finished < rules.min_finished:
            return False
        if not rules.spares_finishing or victim.prompt_left:
            return True
        prompt = candidate.prompt_left * self._prompt_ratio()
        size = lengths.size(len(candidate.sequence.outputs), prompt)
        return size * rules.min_saving <= lengths.size(len(victim.sequence.outputs))

    def _worst_running(self) -> Entry | None:
        lasts = [last for levels in (self._decoding, self._prefilling) if (last := levels.last()) is not None]
        entries = [self._entries[last.request_id] for last in lasts]
        worst = max(entries, key=lambda entry: entry.place, default=None)
        return None if worst is None or worst.is_pinned else worst

    def _start(self, entry: Entry) -> None:
        self._waiting.take_out(entry)
        entry.is_running = True
        self._running += 1
        self._enter(entry)

    def _stop(self, entry: Entry) -> None:
        self.num_replaced += 1
        self._leave(entry)
        self._order += 1
        entry.order, entry.was_running = self._order, True
        self._waiting.put(entry)

    def _enter(self, entry: Entry) -> None:
        self._order += 1
        entry.order = self._order
        entry.place = _PINNED if entry.is_pinned else entry.level
        entry.is_prefilling = entry.prompt_left > 0
        (self._prefilling if entry.is_prefilling else self._decoding).put(entry.place, entry.sequence)

    def _leave(self, entry: Entry) -> None:
        self._take_place(entry)
        entry.is_running = False
        self._running -= 1

    def _take_place(self, entry: Entry) -> None:
        (self._prefilling if entry.is_prefilling else self._decoding).take_out(entry.place, entry.sequence)

    # Levels.

    def _relevel(self, entry: Entry) -> None:
        """Its prompt is done, or it has had what its level gives."""
        if entry.is_running:
            self._take_place(entry)
        else:
            self._waiting.take_out(entry)
        entry.is_aged = False
        self._set_level(entry)
        if entry.is_running:
            self._enter(entry)
        else:
            self._order += 1
            entry.order = self._order
            self._waiting.put(entry)

    def _set_level(self, entry: Entry) -> None:
        expected = self._expected(entry)
        if expected is not None and len(entry.sequence.outputs) < expected:
            level, entry.end = self._hinted_level(entry, expected, len(entry.sequence.outputs))
        else:
            level = self._plain_level(entry, self._outputs(entry))
            entry.end = int(self.rules.quantum * 2**level) if entry.sequence.outputs else 0
        is_batch = entry.sequence.request.service_class == "batch"
        entry.level = level + _BATCH_CLASS * is_batch
        watched = entry.prompt_left or entry.session is not None or entry.is_pinned
        entry.limit = 0 if watched else entry.end

    def _plain_level(self, entry: Entry, outputs: int) -> float:
        """Of a request whose length nobody knows."""
        usual = self._lengths.harmonic
        if entry.prompt_left or not self.rules.sinks_prompt:
            prompt = entry.sequence.num_prompt * self._prompt_ratio() * self.rules.joins_by_prompt
            usual = math.sqrt((prompt + usual) * usual)
        return max(self._level_of(usual), self._level_of(outputs + 1))

    def _hinted_level(self, entry: Entry, expected: float, outputs: int) -> tuple[float, int]:
        """By the geometric mean of what is left and the whole; and the outputs at which that is a level less."""
        ratio = self.rules.hinted_ratio
        prompt = entry.prompt_left * self._prompt_ratio()
        size = math.sqrt((prompt + expected - outputs) * expected)
        steps = max(0, math.ceil(math.log(size / self.rules.quantum, ratio) - 1e-9))
        below = self.rules.quantum * ratio ** (steps - 1)
        end = expected if steps == 0 else expected - below * below / expected
        return steps * math.log2(ratio), max(outputs + 1, math.ceil(end))

    def _level_of(self, num_tokens: float) -> float:
        """The highest level whose quantum holds so many tokens."""
        return max(0.0, float(math.ceil(math.log2(num_tokens / self.rules.quantum) - 1e-9)))

    def _expected(self, entry: Entry) -> float | None:
        hint = entry.sequence.request.expected_tokens
        return None if hint is None or not self.rules.uses_hints else self._hints.expected(hint)

    def _outputs(self, entry: Entry) -> int:
        return len(entry.sequence.outputs) if entry.session is None else entry.session[1]

    def _prompt_ratio(self) -> float:
        """Output tokens whose cost is that of one prompt token."""
        costs = self._cost.costs
        return costs.prefill_token_s / costs.output_token_s(self._max_batch)

    # Nobody starves.

    def _age(self, now: float) -> None:
        if self.rules.aging == math.inf:
            return
        usual = self._level_of(self._lengths.harmonic)
        self.num_aged += self._waiting.age(now, self.rules.aging * self.drain_s(), usual)

    def drain_s(self) -> float:
        """Seconds that all the known work would take."""
        costs = self._cost.costs
        output_s = costs.output_token_s(self._max_batch)
        return costs.prefill_token_s * self._prompt_tokens_left + output_s * self._lengths.mean * len(self._entries)

    def _pin_oldest(self) -> None:
        """Give the oldest the next place, for good, as long as their share is not used up."""
        self._credit += self.rules.oldest_share * self._work
        self._work = 0.0
        most = math.ceil(self.rules.oldest_share * self._max_batch)
        while self._credit > 0 and len(self._pinned) < most:
            entry = self._waiting.oldest()
            if entry is None or entry.is_pinned:
                return
            self.num_pinned += 1
            self._waiting.take_out(entry)
            entry.is_pinned, entry.limit = True, 0
            self._pinned[entry.sequence.request_id] = entry
            self._waiting.put(entry)

    def check(self) -> None:
        """Assert the invariants. For tests."""
        self._waiting.check()
        running = [entry for entry in self._entries.values() if entry.is_running]
        assert len(running) == self._running <= self._max_batch
        filed = [self._entries[sequence.request_id] for sequence in (*self._decoding, *self._prefilling)]
        assert {entry.number for entry in filed} == {entry.number for entry in running}
        assert self._prompt_tokens_left == sum(entry.prompt_left for entry in self._entries.values()) >= 0
        assert all(entry.prompt_left >= 0 and entry.level >= 0 for entry in self._entries.values())
        live = [entry.session for entry in self._entries.values() if entry.session is not None]
        assert sum(count for count, _ in self._sessions.values()) == len(live)

    # What is learnt.

    def _learn(self, sequence: Sequence) -> None:
        count = len(sequence.outputs)
        self._lengths.note(count)
        hint = sequence.request.expected_tokens
        if hint is not None:
            self._hints.note(hint, count)

    def _leave_session(self, session: list[int], sequence: Sequence) -> None:
        session[0] -= 1
        if not session[0]:
            del self._sessions[sequence.request.session or ""]
