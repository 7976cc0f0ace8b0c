"""One iteration's packing: the policy's order meets the memory and the limits of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fastserve_hpc.core.cost import Costs
from fastserve_hpc.core.kv_manager import KvManager
from fastserve_hpc.core.plan import NewRequest, SequenceSlice
from fastserve_hpc.core.policy.base import Policy
from fastserve_hpc.core.residents import Residents
from fastserve_hpc.core.sequence import Sequence
from fastserve_hpc.core.slowdown import BatchRoom

_QUICK = 0.05
"""An upload that takes at most this part of an iteration is waited for; else the others go on without it."""


@dataclass(slots=True)
class Packing:
    """Fills one plan. The rules are the same for every policy:

    - The first `max_batch` sequences in the policy's order may run; of these one plan takes `share`,
      so that `num_stages` plans hold them all. One that waits for its sample, for an upload or for
      its prefix counts, but is left out. (Parked for one ahead of it while in flight, it has left its
      place to those behind it.)
    - The next chunk of a prompt may follow the chunk before it while that is in flight; such a
      sequence does not count towards `share`.
    - A sequence gets the blocks of all its known tokens when it is admitted, later one at a time.
    - Where blocks are short, the last in the policy's order is parked (see `KvManager`), never for
      the sake of one that is behind it.
    - Once a sequence does not fit, those behind it run on in the blocks they have, but get no new
      ones: neither a long request nor a preempted one is overtaken for ever. (Under `defer` they do: who
      waits there does so until others have finished.)
    - Requests of class `batch` get what `room` has for them.
    """

    policy: Policy
    kv: KvManager
    residents: Residents
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
    costs: Costs | None = None
    slices: list[SequenceSlice] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    """Whose slices they are, aligned with `slices`."""
    new_requests: list[NewRequest] = field(default_factory=list)
    num_samples: int = 0
    """Slices that sample."""
    num_prompt_tokens: int = 0
    needs_copies: int = 0
    """The last upload that the slices need and that is not done."""
    is_short_of_blocks: bool = False
    _short: Sequence | None = None

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
            if self._short is not None:
                yield from self.residents.behind(self._short)
                return

    def _place(self, sequence: Sequence) -> bool:
        """Give the sequence its slice of this plan; False if its blocks do not fit."""
        if not sequence.num_blocks:
            return self._bring(sequence)
        end = self._end_of(sequence)
        if end == sequence.num_planned:
            return False
        slots = self._extend(sequence, end) if end > sequence.num_blocks * self.kv.block_size else ()
        if slots is None:
            return False
        self._append(sequence, end, slots)
        return True

    def _end_of(self, sequence: Sequence) -> int:
        """How far its slice may go; no further than it is where it gets none."""
        start, end = sequence.num_planned, sequence.num_tokens
        if end - start > self.budget:
            end = start + self.budget
        return end if self.room is None else self.room.fit(sequence, start, end)

    def _bring(self, sequence: Sequence) -> bool:
        """Place a sequence of whose blocks the workers do not know."""
        if self._end_of(sequence) == sequence.num_planned < sequence.num_tokens:
            return False
        if sequence.request_id not in self.residents.running:
            enters = None if self.is_short_of_blocks else self.residents.enter(sequence, self.plan_id, self.costs)
            if enters is None:
                self._be_short(sequence)
            if not enters:
                return enters is not None
        elif self._extend(sequence, sequence.num_tokens) is None:
            return False
        upload = self.kv.upload_of(sequence.request_id)
        if upload and not self._waits_for(sequence):
            return True
        end = self._end_of(sequence)
        if end > sequence.num_planned:
            self.needs_copies = max(self.needs_copies, upload)
            self._append(sequence, end, self.kv.resume(sequence))
        return True

    def _waits_for(self, sequence: Sequence) -> bool:
        """Whether the plan waits for the sequence's upload, rather than going on without it."""
        if not self.kv.policy.is_early:
            return True
        if self.costs is None:
            return False
        upload_s = self.kv.num_blocks(sequence.request_id) * self.kv.copy_costs.to_device_s
        iteration_s = self.costs.fixed_s + self.costs.decode_sequence_s * len(self.slices)
        return upload_s <= _QUICK * iteration_s

    def _be_short(self, sequence: Sequence) -> None:
        self.is_short_of_blocks = True
        if self._short is None:
            self._short = sequence

    def _extend(self, sequence: Sequence, end: int) -> tuple[int, ...] | None:
        """New slots for a resident sequence to reach `end`."""
        request_id, missing = sequence.request_id, self.kv.blocks_for(end) - self.kv.num_blocks(sequence.request_id)
        if missing <= 0:
            return ()
        if not (self.is_short_of_blocks and self.kv.policy.preempts):
            slots = self.kv.try_extend(request_id, end)
            if slots is None and self.residents.make(sequence, missing, self.costs):
                slots = self.kv.try_extend(request_id, end)
            if slots is not None:
                return slots
        self._be_short(sequence)
        return None

    def _append(self, sequence: Sequence, end: int, slots: tuple[int, ...]) -> None:
        request_id, start, samples = sequence.request_id, sequence.num_planned, end == sequence.num_tokens
        if sequence.last_plan_id <= self.last_done:
            self.share -= 1
        self.budget -= end - start
        if self.room is not None:
            self.room.take(sequence, start, end)
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
        self.kv.note_prompt(sequence, sequence.num_planned, end, self.plan_id)
        if not sequence.num_held:
            request = sequence.request
            self.new_requests.append(NewRequest(request.request_id, request.prompt, request.sampling, request.choice))
            sequence.num_held = sequence.num_prompt
