"""One iteration's packing: the policy's order meets the memory and the limits of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fastserve_hpc.core.kv_manager import KvManager
from fastserve_hpc.core.plan import NewRequest, SequenceSlice
from fastserve_hpc.core.policy.base import Policy
from fastserve_hpc.core.sequence import Sequence
from fastserve_hpc.core.slowdown import BatchRoom


@dataclass(slots=True)
class Packing:
    """Fills one plan. The rules are the same for every policy:

    - The first `max_batch` sequences in the policy's order may run; of these one plan takes `share`,
      so that `num_stages` plans hold them all. One whose sample is in flight counts, but is left out.
    - The next chunk of a prompt may follow the chunk before it while that is in flight; such a
      sequence does not count towards `share`.
    - A sequence gets the blocks of all its known tokens when it is admitted, later one at a time.
    - Where blocks are short, the last in the policy's order loses all of its blocks (it is
      *preempted*: it waits and is computed again), never for the sake of one that is behind it.
    - Once a sequence does not fit, those behind it run on in the blocks they have, but get no new
      ones: neither a long request nor a preempted one is overtaken for ever.
    - Requests of class `batch` get what `room` has for them.
    """

    policy: Policy
    kv: KvManager
    running: dict[int, Sequence]
    """Those that hold blocks. Admissions and preemptions change it here."""
    plan_id: int
    last_done: int
    """The last plan whose result is in."""
    max_batch: int
    budget: int
    """Tokens that the plan may still take."""
    share: int
    """Sequences that the plan may still take."""
    room: BatchRoom | None = None
    """What is open to class `batch`; None: everything."""
    slices: list[SequenceSlice] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    """Whose slices they are, aligned with `slices`."""
    new_requests: list[NewRequest] = field(default_factory=list)
    num_samples: int = 0
    """Slices that sample."""
    num_prompt_tokens: int = 0
    num_preempted: int = 0
    is_short_of_blocks: bool = False
    _behind: list[Sequence] = field(default_factory=list)

    def fill(self, now: float) -> None:
        """Take slices until one of the limits is reached."""
        for sequence in self._in_order(now):
            if sequence.awaits_sample or self._place(sequence):
                self.max_batch -= 1
            if not (self.max_batch and self.budget and self.share) or (self.room and self.room.is_full):
                return

    def _in_order(self, now: float) -> Iterator[Sequence]:
        """The policy's order; once blocks are short, only those that hold some: the queue may be long."""
        for sequence in self.policy.ranked(now):
            yield sequence
            if self.is_short_of_blocks:
                yield from self._behind
                return

    def _place(self, sequence: Sequence) -> bool:
        """Give the sequence its slice of this plan; False if its blocks do not fit."""
        start, end = sequence.num_planned, sequence.num_tokens
        if end - start > self.budget:
            end = start + self.budget
        if self.room is not None:
            end = self.room.fit(sequence, start, end)
            if end == start:
                return False
        slots = self._extend(sequence, end) if start else self._admit(sequence)
        if slots is None:
            self.is_short_of_blocks = True
            return False
        if sequence.last_plan_id <= self.last_done:
            self.share -= 1
        self.budget -= end - start
        if self.room is not None:
            self.room.take(sequence, start, end)
        self._append(sequence, end, slots)
        return True

    def _append(self, sequence: Sequence, end: int, slots: tuple[int, ...]) -> None:
        request_id, start, samples = sequence.request_id, sequence.num_planned, end == sequence.num_tokens
        unsent: tuple[int, ...] = ()
        if start < sequence.num_prompt:
            self._append_prompt(sequence, end)
        if end > sequence.num_held:
            unsent = (sequence.outputs[-1],)
            sequence.num_held = end
        self.slices.append(SequenceSlice(request_id, start, end - start, sequence.num_blocks, slots, unsent, samples))
        self.sequences.append(sequence)
        self.num_samples += samples
        sequence.num_planned = end
        sequence.num_blocks += len(slots)
        sequence.awaits_sample = samples
        sequence.last_plan_id = self.plan_id

    def _append_prompt(self, sequence: Sequence, end: int) -> None:
        self.num_prompt_tokens += min(end, sequence.num_prompt) - sequence.num_planned
        if not sequence.num_held:
            request = sequence.request
            self.new_requests.append(NewRequest(request.request_id, request.prompt, request.sampling, request.choice))
            sequence.num_held = sequence.num_prompt

    def _extend(self, sequence: Sequence, end: int) -> tuple[int, ...] | None:
        """New slots for a running sequence to reach `end`."""
        if end <= sequence.num_blocks * self.kv.block_size:
            return ()
        if self.is_short_of_blocks:
            return None
        slots = self.kv.try_extend(sequence.request_id, end)
        if slots is None and self._make_room(sequence, self.kv.blocks_for(end) - sequence.num_blocks):
            slots = self.kv.try_extend(sequence.request_id, end)
        return slots

    def _admit(self, sequence: Sequence) -> tuple[int, ...] | None:
        """Slots for a waiting sequence's known tokens.

        One block is left for each sequence that runs: a pool filled to the brim would have to
        preempt again at the next tokens.
        """
        needed = self.kv.blocks_for(sequence.num_tokens)
        if self.kv.num_free < needed + len(self.running) and not self._make_room(sequence, needed, reserve=True):
            return None
        self.running[sequence.request_id] = sequence
        return self.kv.try_extend(sequence.request_id, sequence.num_tokens)

    def _make_room(self, sequence: Sequence, needed: int, reserve: bool = False) -> bool:
        """Preempt sequences behind this one until it will fit. True if it fits now, not after plans in flight.

        With `reserve` one more block is needed for each running sequence ahead of it.
        """
        behind = self._behind = self._running_behind(sequence)
        needed += (len(self.running) - len(behind)) * reserve
        coming = self.kv.num_free + self.kv.num_retiring
        if coming + sum(other.num_blocks for other in behind) < needed:
            return False
        while self.kv.num_free + self.kv.num_retiring < needed:
            self._preempt(behind.pop())
        return self.kv.num_free >= needed

    def _running_behind(self, sequence: Sequence) -> list[Sequence]:
        key_of = self.policy.order_key
        own_key = key_of(sequence)
        return sorted((other for other in self.running.values() if key_of(other) > own_key), key=key_of)

    def _preempt(self, sequence: Sequence) -> None:
        del self.running[sequence.request_id]
        self.kv.free(sequence.request_id, sequence.last_plan_id)
        sequence.num_planned = sequence.num_blocks = 0
        sequence.num_preemptions += 1
        self.num_preempted += 1
