"""Skip-join MLFQ over output tokens: short answers first, never much worse than order of arrival.

docs/scheduling.md explains each rule and says what it brings.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from fastserve_hpc.core.cost import CostModel
from fastserve_hpc.core.enst import Standing
from fastserve_hpc.core.policy.aging import Aging, factor_of
from fastserve_hpc.core.policy.base import OrderKey
from fastserve_hpc.core.policy.entry import Entry
from fastserve_hpc.core.policy.running import Running
from fastserve_hpc.core.policy.sessions import Sessions
from fastserve_hpc.core.policy.sizing import Sizing, SkipJoinRules
from fastserve_hpc.core.policy.waiting import Waiting
from fastserve_hpc.core.sequence import Sequence

_BATCH_CLASS = 1000.0
"""Added to the levels of the service class `batch`: behind everyone else."""


class SkipJoin:
    """Multi-level feedback queues; a level stands for the output tokens that a request may take."""

    name = "skip-join"

    def __init__(self, max_batch: int, cost: CostModel, rules: SkipJoinRules | None = None, num_stages: int = 1):
        self.rules = rules or SkipJoinRules()
        self.num_replaced = 0
        """Running requests that had to give their place to another."""
        self.num_aged = 0
        self.num_pinned = 0
        self._max_batch = max_batch
        self._sizing = Sizing(self.rules, max_batch, cost, num_stages)
        self._entries: dict[int, Entry] = {}
        self._waiting = Waiting()
        self._running = Running()
        self._aging = Aging()
        self._pinned: dict[int, Entry] = {}
        self._sessions = Sessions()
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
        if self.rules.uses_sessions and sequence.request.session is not None:
            entry.session = self._sessions.join(sequence.request.session)
        self._set_level(entry)
        self._wait(entry)

    def remove(self, sequence: Sequence, is_complete: bool) -> None:
        entry = self._entries.pop(sequence.request_id)
        self._take_out(entry)
        self._pinned.pop(sequence.request_id, None)
        self._prompt_tokens_left -= entry.prompt_left
        if entry.session is not None:
            self._sessions.leave(entry.session)
        if is_complete:
            self._count_last(entry)
            self._sizing.learn(sequence)

    def on_progress(self, sequence: Sequence, num_tokens: int, now: float) -> None:  # noqa: ARG002
        entry = self._entries[sequence.request_id]
        self._work += num_tokens
        if len(sequence.outputs) >= entry.limit:
            self._look_at(entry, num_tokens)

    def _count_last(self, entry: Entry) -> None:
        """`on_progress` does not tell of the iteration in which a request ends; for a short one it is the only one."""
        done = entry.prompt_left * self._sizing.prompt_ratio() + 1
        self._work += done
        if entry.is_pinned:
            self._credit -= done

    def _look_at(self, entry: Entry, num_tokens: int) -> None:
        """What `on_progress` need not do for every token of every sequence."""
        if entry.prompt_left:
            self._compute_prompt(entry, num_tokens)
        elif entry.session is not None:
            entry.session.tokens += num_tokens
        if entry.is_pinned:
            self._credit -= 1
        if not entry.prompt_left and self._outputs(entry) >= entry.end:
            self._relevel(entry)

    def _compute_prompt(self, entry: Entry, num_tokens: int) -> None:
        done = min(num_tokens, entry.prompt_left)
        prompt_ratio = self._sizing.prompt_ratio()
        self._work += done * (prompt_ratio - 1) + 1
        if entry.is_pinned:
            self._credit -= done * prompt_ratio
        entry.prompt_left -= done
        self._prompt_tokens_left -= done

    # The order.

    def ranked(self, now: float) -> Iterator[Sequence]:
        self._select(now)
        yield from self._running
        for entry in self._waiting.ordered():
            yield entry.sequence

    def counters(self) -> dict[str, float]:
        done = {"replaced": self.num_replaced, "aged": self.num_aged, "pinned": self.num_pinned}
        levels = Counter(entry.level for entry in self._entries.values())
        return {**done, **{f"level_{level:g}": levels[level] for level in sorted(levels)}}

    def order_key(self, sequence: Sequence) -> OrderKey:
        entry = self._entries[sequence.request_id]
        if not entry.is_running:
            return (2.0, *entry.wait_key)
        return (float(entry.is_prefilling), entry.place, float(entry.order))

    def standing(self, sequence: Sequence, now: float) -> Standing:
        """Those that wait are promoted by age; who runs is where its level is."""
        entry = self._entries[sequence.request_id]
        quantum_s = self._sizing.quantum_s(min(entry.level, _BATCH_CLASS))
        if entry.is_pinned or entry.is_aged:
            return Standing(quantum_s, 0.0)
        if entry.is_running or self.rules.aging == math.inf:
            return Standing(quantum_s, math.inf)
        bound_s = self._aging_bound_s() * factor_of(entry, self._sizing.usual_level())
        return Standing(quantum_s, max(0.0, bound_s - (now - entry.arrived)))

    def _select(self, now: float) -> None:
        """Choose who holds the places of the batch."""
        self._age(now)
        if self._waiting.is_empty:
            self._work = 0.0
            return
        self._pin_oldest()
        while (entry := self._waiting.first()) is not None and len(self._running) < self._max_batch:
            self._start(entry)
        while (entry := self._waiting.first()) is not None and entry.is_pinned:
            self._make_way(entry)
        self._replace()

    def _make_way(self, pinned: Entry) -> None:
        """A pinned request takes the place of the worst. There are far fewer pinned ones than places."""
        victim = self._running.last()
        if victim is not None:
            self._stop(victim)
        self._start(pinned)

    def _replace(self) -> None:
        """Waiting requests take the places of running ones that are much worse."""
        if not self.rules.replaces:
            return
        spared = self._sizing.usual_level() + self.rules.spared_levels
        while (candidate := self._waiting.best()) is not None:
            victim = self._victim_of(candidate, spared)
            if victim is None:
                return
            self._stop(victim)
            self._start(candidate)

    def _victim_of(self, candidate: Entry, spared: float) -> Entry | None:
        """The worst running request that is worth replacing, of the first few."""
        least = candidate.level + (self.rules.hinted_gap if candidate.is_hinted else self.rules.min_gap)
        for victim in self._running.from_last():
            if victim.place < least or (victim.place < spared and not victim.is_hinted):
                continue
            if victim.level >= _BATCH_CLASS or self._is_worth_it(candidate, victim):
                return victim
        return None

    def _is_worth_it(self, candidate: Entry, victim: Entry) -> bool:
        """Whether, as far as recent answers tell, the candidate has much less before it."""
        if victim.is_hinted and candidate.is_hinted:
            return True
        if self._sizing.lengths.num_finished < self.rules.min_finished:
            return False
        if not self.rules.spares_finishing or victim.prompt_left:
            return True
        return self._sizing.is_less(candidate.sequence, candidate.prompt_left, victim.sequence)

    def _start(self, entry: Entry) -> None:
        self._waiting.take_out(entry)
        self._run(entry)

    def _stop(self, entry: Entry) -> None:
        self.num_replaced += 1
        self._running.take_out(entry)
        entry.order, entry.was_running = self._next_order(), True
        self._wait(entry)

    def _run(self, entry: Entry) -> None:
        self._running.put(entry, self._next_order())
        self._aging.watch(entry)

    def _wait(self, entry: Entry) -> None:
        self._waiting.put(entry)
        self._aging.watch(entry)

    def _take_out(self, entry: Entry) -> None:
        if entry.is_running:
            self._running.take_out(entry)
        else:
            self._waiting.take_out(entry)

    def _next_order(self) -> int:
        self._order += 1
        return self._order

    # Levels.

    def _relevel(self, entry: Entry) -> None:
        """Its prompt is done, or it has had what its level gives."""
        is_running = entry.is_running
        self._take_out(entry)
        entry.is_aged = False
        self._set_level(entry)
        if is_running:
            self._run(entry)
        else:
            entry.order = self._next_order()
            self._wait(entry)

    def _set_level(self, entry: Entry) -> None:
        sequence = entry.sequence
        hinted = self._sizing.hinted_level(sequence, entry.prompt_left)
        is_prompt_done = not entry.prompt_left
        plain = self._sizing.plain_level(sequence.num_prompt, is_prompt_done, self._outputs(entry))
        entry.is_hinted = hinted is not None
        entry.level, entry.end = hinted or plain
        if not sequence.outputs:
            entry.end = 0
        if self.rules.uses_classes and sequence.request.service_class == "batch":
            entry.level += _BATCH_CLASS
        watched = entry.prompt_left or entry.session is not None or entry.is_pinned
        entry.limit = 0 if watched else entry.end

    def _outputs(self, entry: Entry) -> int:
        return len(entry.sequence.outputs) if entry.session is None else entry.session.tokens

    # Nobody starves.

    def _age(self, now: float) -> None:
        if self.rules.aging == math.inf:
            return
        for entry in self._aging.due(now, self._aging_bound_s(), self._sizing.usual_level()):
            self.num_aged += 1
            if entry.is_running:
                self._running.promote(entry, self._next_order())
            else:
                self._waiting.promote(entry)

    def _aging_bound_s(self) -> float:
        return self.rules.aging * self.drain_s()

    def drain_s(self) -> float:
        """Seconds that all the known work would take."""
        return self._sizing.drain_s(self._prompt_tokens_left, len(self._entries))

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
            self._waiting.put(entry)  # first of all, whatever its age

    def check(self) -> None:
        """Assert the invariants. For tests."""
        self._waiting.check()
        self._running.check()
        running = [request_id for request_id, entry in self._entries.items() if entry.is_running]
        assert sorted(running) == sorted(sequence.request_id for sequence in self._running)
        assert len(running) <= self._max_batch
        assert self._prompt_tokens_left == sum(entry.prompt_left for entry in self._entries.values()) >= 0
        assert all(entry.prompt_left >= 0 and entry.level >= 0 for entry in self._entries.values())
        self._sessions.check(sum(entry.session is not None for entry in self._entries.values()))
