"""What requests of class `batch` may cost those of class `interactive`.

A bound S of 2 means: no interactive request takes more than about twice the time that it would without the batch. Each
interactive request has an account: the time since it came, and what of that it would have taken without the batch,
from how long iterations took and what part of each was theirs. A plan that carries interactive work gets batch
slices only as far as it is predicted to take at most S times as long as without them, and as far as every
interactive request in it stays within S times its account. A plan without interactive work is kept short while such
requests come, because whoever arrives waits for its end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from fastserve_hpc.core.cost import CostModel, Costs, prefill_attention
from fastserve_hpc.core.sequence import Sequence

QUIET_S = 60.0
"""After so long without an interactive request a batch may fill whole iterations."""
MIN_TOKENS = 16
"""What the first batch slice of a plan may have, however short the plan should be."""
_FORGET = 0.95
"""Weight of a first token's time after the next one."""
_MARGIN = 0.9
"""Of what S allows, the part that is given away: slower iterations hold requests longer, who then meet more others."""
_FIRST_TOKEN_PART = 0.3
"""And of that, in a plan with somebody who waits for the first token: others come meanwhile, and wait too."""


class BatchRoom:
    """What of one plan is open to class `batch`. Interactive slices come first, `take` counts both."""

    def __init__(self, rule: SlowdownRule, now: float) -> None:
        self._rule = rule
        self._costs = rule.costs
        self._now = now
        self._interactive: list[int] = []
        self._awaits_first_token = False
        self._limits: dict[float, float] = {}
        self.base_s = 0.0
        """Predicted seconds of the interactive slices alone; 0 without any."""
        self.seconds = self._costs.fixed_s
        """Predicted seconds of all slices."""
        self.is_full = False

    @property
    def interactive_part(self) -> float:
        """Of the plan's time, what it would have taken without the batch."""
        return self.base_s / self.seconds

    def take(self, sequence: Sequence, start: int, end: int) -> None:
        """A slice of the plan."""
        self.seconds += _slice_s(self._costs, start, end)
        if sequence.request.service_class == "interactive":
            self._interactive.append(sequence.request_id)
            self._awaits_first_token |= not sequence.outputs
            self.base_s = self.seconds

    def fit(self, sequence: Sequence, start: int, end: int) -> int:
        """How far a slice from `start` may go: at most to `end`, and not beyond `start` where there is no room."""
        slowdown = sequence.slowdown
        if sequence.request.service_class == "interactive" or slowdown == math.inf:
            return end
        limit_s = self._limits.get(slowdown)
        if limit_s is None:
            limit_s = self._rule.limit_s(slowdown, self.base_s, self._interactive, self._awaits_first_token, self._now)
            self._limits[slowdown] = limit_s
        reach = _reach(self._costs, start, end, limit_s - self.seconds)
        if reach == start and not self._interactive and self.seconds == self._costs.fixed_s:
            reach = min(end, start + MIN_TOKENS)  # a batch never stands still
        self.is_full = reach < end
        return reach


class SlowdownRule:
    """The accounts of all interactive requests. Told by the scheduler what comes, goes and was done."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._base_s = 0.0
        """What all iterations so far would have taken without the batch."""
        self._arrivals: dict[int, tuple[float, float]] = {}
        """Of each interactive request that is not finished, when it came and `_base_s` then."""
        self._num_batch = 0
        """Requests of class `batch` that are not finished."""
        self._last_seen = -math.inf
        self._last_plan_s = 0.0
        """Of the last plan that carried interactive work, without the batch."""
        self._first_token_s: float | None = None
        """What interactive requests would have waited for their first token, on average."""

    @property
    def costs(self) -> Costs:
        return self._cost.costs

    def add(self, sequence: Sequence, now: float) -> None:
        if sequence.request.service_class == "interactive":
            self._arrivals[sequence.request_id] = (now, self._base_s)
            self._last_seen = now
        else:
            self._num_batch += 1

    def remove(self, sequence: Sequence) -> None:
        if self._arrivals.pop(sequence.request_id, None) is None:
            self._num_batch -= 1

    def room(self, now: float) -> BatchRoom | None:
        """For the next plan; None where there is no request of class `batch` to be bounded."""
        return BatchRoom(self, now) if self._num_batch else None

    def landed(self, seconds: float, interactive_part: float) -> None:
        """A plan took so long, and this part of it would have been left without the batch."""
        if interactive_part > 0:
            self._last_plan_s = seconds * interactive_part
            self._base_s += self._last_plan_s

    def first_token(self, sequence: Sequence) -> None:
        """An interactive request has its first token."""
        arrival = self._arrivals.get(sequence.request_id)
        if arrival is not None:
            took, known = self._base_s - arrival[1], self._first_token_s
            self._first_token_s = took if known is None else _FORGET * known + (1 - _FORGET) * took

    def limit_s(
        self, slowdown: float, base_s: float, interactive: Iterable[int], awaits_first_token: bool, now: float
    ) -> float:
        """How long a plan may take of which interactive slices take `base_s`."""
        allowed = 1 + _MARGIN * (slowdown - 1)
        if base_s > 0:
            most = 1 + _FIRST_TOKEN_PART * (allowed - 1) if awaits_first_token else allowed
            return min(most * base_s, base_s + self._slack_s(allowed, base_s, interactive, now))
        if self._arrivals:  # they are in other plans, or wait for blocks
            return allowed * self._last_plan_s
        if self._first_token_s is None or now - self._last_seen >= QUIET_S:
            return math.inf
        return (allowed - 1) * self._first_token_s

    def _slack_s(self, allowed: float, base_s: float, interactive: Iterable[int], now: float) -> float:
        """By how much the plan may take longer for every request in it to stay within its account."""
        slack = math.inf
        for request_id in interactive:
            arrived, base_then = self._arrivals[request_id]
            entitled_s = allowed * (self._base_s - base_then + base_s)
            slack = min(slack, entitled_s - (now - arrived + base_s))
        return max(0.0, slack)


def _slice_s(costs: Costs, start: int, end: int) -> float:
    """What positions [start, end) add to an iteration."""
    if end - start == 1:
        return costs.decode_sequence_s + costs.kv_token_s * end
    return costs.prefill_s(start, end) + costs.kv_token_s * start


def _reach(costs: Costs, start: int, end: int, room_s: float) -> int:
    """The end of the longest slice from `start`, up to `end`, that takes at most `room_s`."""
    if _slice_s(costs, start, end) <= room_s:
        return end
    if end - start == 1:
        return start
    token_s = costs.prefill_token_s + costs.prefill_attention_s * prefill_attention(start, end) / (end - start)
    num_tokens = int((room_s - costs.kv_token_s * start) / token_s) if token_s > 0 else 0
    reach = start + max(0, min(num_tokens, end - start - 1))
    is_alone = reach == start + 1  # that costs as much as a decode
    return start if is_alone and _slice_s(costs, start, reach) > room_s else reach
