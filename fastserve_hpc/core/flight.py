"""Plans from their number to their result, and what has been done since the start."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from fastserve_hpc.core.packing import Packing
from fastserve_hpc.core.plan import BlockCopy, IterationPlan, IterationResult, SequenceSlice
from fastserve_hpc.core.sequence import Sequence


@dataclass(slots=True)
class Counters:
    """What has been done since the start."""

    iterations: int = 0
    prompt_tokens: int = 0
    """Prompt positions computed; those that are computed again count again."""
    output_tokens: int = 0
    preemptions: int = 0
    """Times that a request had to leave its blocks on the device to others."""
    copy_waits: int = 0
    """Plans whose compute had to wait for an upload."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A plan whose result is awaited."""

    plan_id: int
    slices: tuple[SequenceSlice, ...]
    sequences: tuple[Sequence, ...]
    num_samples: int
    num_prompt_tokens: int
    planned_s: float
    """When, on the scheduler's clock."""
    interactive_part: float
    """Of its time, what it would have taken without class `batch`."""


class Flights:
    """Numbers plans, up to one a stage in flight; takes their results in the same order."""

    def __init__(self, num_stages: int, last_plan_id: int):
        """The ranks have computed all plans up to `last_plan_id`."""
        self._num_stages = num_stages
        self._flights: deque[Flight] = deque()
        self._to_forget: list[int] = []
        self.last_plan_id = last_plan_id
        self.last_done = last_plan_id
        """The last plan whose result is in."""

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def is_full(self) -> bool:
        """Every stage has a plan."""
        return len(self._flights) >= self._num_stages

    @property
    def has_news(self) -> bool:
        """The workers have somebody to forget."""
        return bool(self._to_forget)

    def forget(self, request_id: int) -> None:
        """Tell the workers with the next plan that a request has ended."""
        self._to_forget.append(request_id)

    def start(self, packing: Packing, copies: tuple[BlockCopy, ...], now: float) -> IterationPlan:
        """The plan of what was packed. Without slices it is not in flight: no result of it is awaited."""
        self.last_plan_id += 1
        plan = IterationPlan(
            self.last_plan_id,
            slices=tuple(packing.slices),
            new_requests=tuple(packing.new_requests),
            finished=self._take_forgotten(),
            copies=copies,
            needs_copies=packing.needs_copies,
        )
        if plan.slices:
            flight = (plan.slices, tuple(packing.sequences), packing.num_samples, packing.num_prompt_tokens)
            part = 1.0 if packing.room is None else packing.room.interactive_part
            self._flights.append(Flight(plan.plan_id, *flight, now, part))
        return plan

    def shutdown(self) -> IterationPlan:
        """The last plan: the workers leave their loop."""
        self.last_plan_id += 1
        return IterationPlan(self.last_plan_id, finished=self._take_forgotten(), shutdown=True)

    def _take_forgotten(self) -> tuple[int, ...]:
        forgotten, self._to_forget = tuple(self._to_forget), []
        return forgotten

    def land(self, result: IterationResult) -> Flight | None:
        """The plan that the result is for, which is no longer in flight then; None for one without slices.

        Raises ValueError for any result but the next.
        """
        oldest = self._flights[0] if self._flights else None
        if oldest is None or result.plan_id < oldest.plan_id:
            if result.token_ids or not self.last_done < result.plan_id <= self.last_plan_id:
                raise ValueError(f"result of plan {result.plan_id}, which is not in flight")
            return None
        if result.plan_id != oldest.plan_id:
            raise ValueError(f"result of plan {result.plan_id}, but plan {oldest.plan_id} comes first")
        _check_counts(result, oldest.num_samples)
        self._flights.popleft()
        self.last_done = oldest.plan_id
        return oldest

    def check(self) -> list[int]:
        """Assert the invariants. Returns the unfinished requests whose samples are awaited."""
        plan_ids = [flight.plan_id for flight in self._flights]
        assert len(plan_ids) <= self._num_stages
        assert plan_ids == sorted(set(plan_ids))
        assert all(self.last_done < plan_id <= self.last_plan_id for plan_id in plan_ids)
        pieces = [pair for flight in self._flights for pair in zip(flight.sequences, flight.slices, strict=True)]
        return sorted(sequence.request_id for sequence, piece in pieces if piece.samples and not sequence.is_finished)


def _check_counts(result: IterationResult, num_samples: int) -> None:
    for name, count in (("tokens", len(result.token_ids)), ("logprobs", len(result.logprobs) or num_samples)):
        if count != num_samples:
            raise ValueError(f"plan {result.plan_id} has {num_samples} slices that sample, its result {count} {name}")
