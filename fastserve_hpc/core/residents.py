"""Who has a place on the device: who has to leave for whom, and what is moved ahead of need."""

from __future__ import annotations

from itertools import islice

from fastserve_hpc.core.cost import Costs
from fastserve_hpc.core.enst import Leveled, by_next_run
from fastserve_hpc.core.kv_manager import KvManager
from fastserve_hpc.core.policy.base import Policy
from fastserve_hpc.core.sequence import Sequence

LOOK_EVERY = 4
"""Plans between two looks at what could be moved early: each look goes through all that are resident."""
_RESERVE = 16
"""One block in so many is kept free for bursts, where blocks may be moved early."""
_MOST_LOOKED_AT = 64
"""Parked sequences that a look goes through."""
_COPY_SHARE = 0.5
"""The part of the time that early copies may take of the way to the host."""


class Residents:
    """The sequences that hold blocks on the device. Makes room by parking some."""

    def __init__(self, policy: Policy, kv: KvManager, max_batch: int):
        self._policy = policy
        self._kv = kv
        self.running: dict[int, Sequence] = {}
        """Those that hold blocks on the device."""
        self.num_preempted = 0
        self.now = 0.0
        """When the plan is packed."""
        self._batch = max_batch
        self._parked: dict[int, Sequence] = {}

    def enter(self, sequence: Sequence, plan_id: int, costs: Costs | None) -> bool | None:
        """Make a sequence resident, with blocks for all its known tokens. None: it does not fit yet.

        False: it waits for another one to compute its prefix. One block is left for each sequence that runs: a
        pool filled to the brim would have to preempt again at the next tokens.
        """
        needed = self._kv.begin(sequence, plan_id, costs)
        if needed is None:
            return False
        if self._kv.num_free < needed + len(self.running) and not (
            self._kv.policy.preempts and self.make(sequence, needed, costs, reserve=True)
        ):
            self._kv.cancel(sequence)
            return None
        self._complete(sequence)
        return True

    def _complete(self, sequence: Sequence) -> None:
        sequence.num_planned = self._kv.complete(sequence)
        self._parked.pop(sequence.request_id, None)
        self.running[sequence.request_id] = sequence

    def make(self, sequence: Sequence, needed: int, costs: Costs | None, reserve: bool = False) -> bool:
        """Park sequences behind this one until it will fit. True if it fits now, not after plans in flight.

        With `reserve` one more block is needed for each running sequence ahead of it.
        """
        kv, behind = self._kv, self._last_to_run(self.behind(sequence))
        needed += (len(self.running) - len(behind)) * reserve
        count = kv.victims_for(needed - kv.num_free - kv.num_retiring, behind)
        if count is None:
            return False
        for victim in behind[len(behind) - count :]:
            self.park(victim, costs)
        return kv.num_free >= needed

    def _last_to_run(self, behind: list[Sequence]) -> list[Sequence]:
        """Those that are next to run first."""
        if not (self._kv.policy.by_enst and isinstance(self._policy, Leveled)):
            return behind
        others = {*self.running.values()} - {*behind}
        return by_next_run(self._policy, behind, others, self._batch, self.now)

    def behind(self, sequence: Sequence) -> list[Sequence]:
        """The resident sequences that come after this one, in order."""
        key_of = self._policy.order_key
        own_key = key_of(sequence)
        return sorted((other for other in self.running.values() if key_of(other) > own_key), key=key_of)

    def park(self, sequence: Sequence, costs: Costs | None) -> None:
        """Take a sequence's place on the device."""
        del self.running[sequence.request_id]
        self._kv.park(sequence, costs)
        self._parked[sequence.request_id] = sequence
        sequence.num_blocks = 0
        sequence.num_preemptions += 1
        self.num_preempted += 1

    def leave(self, sequence: Sequence) -> None:
        """A request has ended."""
        self.running.pop(sequence.request_id, None)
        self._parked.pop(sequence.request_id, None)
        self._kv.free(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Give up all KV of a sequence; it is computed again."""
        self.running.pop(sequence.request_id, None)
        self._kv.discard(sequence)
        sequence.num_blocks = 0

    def look_ahead(self, plan_id: int, num_stages: int, costs: Costs | None) -> None:
        """Where free blocks run low: park those that do not run, and mirror those that may be next to leave.

        Called before a plan is packed; what it moves is in that plan.
        """
        kv = self._kv
        if plan_id % LOOK_EVERY:
            return
        low = max(len(self.running), kv.num_total // _RESERVE)
        coming = kv.num_free + kv.num_retiring
        if coming >= 2 * low:
            if self._parked and kv.policy.prefetches:
                self._prefetch(plan_id, 2 * low, costs)
            return
        order = self._last_to_run(sorted(self.running.values(), key=self._policy.order_key))
        while order and kv.num_free + kv.num_retiring < low:
            last = order.pop()
            if last.last_plan_id + 2 * num_stages < plan_id and last.num_blocks:
                self.park(last, costs)
        if kv.policy.mirrors:
            self._mirror(order, costs)

    def _prefetch(self, plan_id: int, reserve: int, costs: Costs | None) -> None:
        """Bring the parked sequence back that is next to run, if that leaves the reserve."""
        candidates = list(islice(self._parked.values(), _MOST_LOOKED_AT))
        candidates.sort(key=self._policy.order_key)
        sequence = self._last_to_run(candidates)[0]
        needed = self._kv.begin(sequence, plan_id, costs)
        if needed is None:
            return
        if self._kv.num_free < needed + reserve:
            self._kv.cancel(sequence)
        else:
            self._complete(sequence)

    def _mirror(self, order: list[Sequence], costs: Costs | None) -> None:
        """The last ones' full blocks, as many as the copies' share of the time allows."""
        left = self._copies_in_a_look(costs)
        for sequence in reversed(order):
            if left <= 0:
                return
            left -= self._kv.mirror(sequence, left)

    def _copies_in_a_look(self, costs: Costs | None) -> int:
        block_s = self._kv.copy_costs.to_host_s
        if costs is None or block_s <= 0:
            return self._kv.num_total
        seconds = LOOK_EVERY * (costs.fixed_s + costs.decode_sequence_s * len(self.running))
        return 1 + int(_COPY_SHARE * seconds / block_s)
