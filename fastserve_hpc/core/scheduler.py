"""Who runs in the next iteration. A pure function of what it was told; the clock is an argument.

*Policy orders, memory admits, the scheduler packs.* `schedule` decides the next plan, `update` takes
the results, in the order of the plans; up to `num_stages` plans are in flight.
"""

from __future__ import annotations

import math
from itertools import repeat

from fastserve_hpc.core.cost import CostModel, load_of
from fastserve_hpc.core.flight import Counters, Flight, Flights
from fastserve_hpc.core.kv_manager import KvManager
from fastserve_hpc.core.packing import Packing
from fastserve_hpc.core.plan import IterationPlan, IterationResult, TokenDelta
from fastserve_hpc.core.policy.base import Policy
from fastserve_hpc.core.policy.by_class import ByClass
from fastserve_hpc.core.request import FinishReason, Request
from fastserve_hpc.core.residents import Residents
from fastserve_hpc.core.sequence import Sequence
from fastserve_hpc.core.slowdown import SlowdownRule
from fastserve_hpc.errors import RequestError


class Scheduler:
    """Requests in, plans out; results in, tokens out."""

    def __init__(
        self,
        policy: Policy,
        kv: KvManager,
        *,
        max_batch: int,
        max_batch_tokens: int,
        num_stages: int = 1,
        cost: CostModel | None = None,
        max_slowdown: float = math.inf,
        last_plan_id: int = 0,
    ):
        """`cost` learns from the times that results bring and, under `ByClass`, bounds what class `batch` costs: at
        most `max_slowdown`, whatever such a request says. The ranks have computed all plans up to `last_plan_id`.
        """
        limits = {"max_batch": max_batch, "max_batch_tokens": max_batch_tokens, "num_stages": num_stages}
        for name, value in limits.items():
            if value < 1:
                raise ValueError(f"{name} is {value}: it must be at least 1")
        self.policy = policy
        self.kv = kv
        self.cost = cost
        self.max_slowdown = max_slowdown
        self.max_batch = max_batch
        self.max_batch_tokens = max_batch_tokens
        self.num_stages = num_stages
        self.counters = Counters()
        self._live: dict[int, Sequence] = {}
        self._residents = Residents(policy, kv, max_batch)
        self._flights = Flights(num_stages, last_plan_id)
        self._is_short_of_blocks = False
        # The rule needs interactive requests to come first.
        self._slowdown = SlowdownRule(cost) if cost is not None and isinstance(policy, ByClass) else None
        self._landed_s = -math.inf

    @property
    def num_running(self) -> int:
        """Requests that hold blocks on the device."""
        return len(self._residents.running)

    @property
    def num_waiting(self) -> int:
        """Requests that hold none: not begun, or preempted."""
        return len(self._live) - len(self._residents.running)

    @property
    def num_in_flight(self) -> int:
        """Plans whose results are awaited."""
        return len(self._flights)

    @property
    def is_idle(self) -> bool:
        """No request is here and nothing is in flight."""
        return not (self._live or self._flights)

    def request_ids(self) -> list[int]:
        """The requests that are not finished, by arrival."""
        return list(self._live)

    def num_outputs(self, request_id: int) -> int:
        """Tokens that an unfinished request has been given."""
        return len(self._live[request_id].outputs)

    def details(self) -> dict[str, float]:
        """What `status` shows of the policy and the cost model, by name."""
        error = None if self.cost is None else self.cost.relative_error
        return {
            **self.policy.counters(),
            **({} if error is None else {"cost_model_error": error}),
            **self.kv.details(),
            "copy_waits": self.counters.copy_waits,
        }

    def add(self, request: Request, now: float) -> None:
        """Take a request that the front end has resolved (see `Request`).

        Raises `RequestError` with the numbers if the KV cache can never hold it.
        """
        if request.request_id in self._live:
            raise ValueError(f"request {request.request_id} is already here: ids are used once")
        sequence = Sequence(request, now)
        if (reason := self.kv.why_never(sequence)) is not None:
            raise RequestError(reason, code="context_length_exceeded")
        self._live[request.request_id] = sequence
        self.policy.add(sequence, now)
        if self._slowdown is not None:
            self._slowdown.add(sequence, now)
        if request.slowdown is not None or self.max_slowdown < sequence.slowdown:
            self.set_slowdown(request.request_id, request.slowdown or sequence.slowdown)

    def set_slowdown(self, request_id: int, slowdown: float) -> None:
        """Change what a request of class `batch` may cost interactive ones. Unknown ids are ignored."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            sequence.slowdown = min(slowdown, self.max_slowdown)

    def abort(self, request_id: int, now: float) -> None:  # noqa: ARG002
        """Drop a request, whatever its state; no token of it follows. Unknown and finished ids are ignored."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            self._remove(sequence)

    def schedule(self, now: float) -> IterationPlan | None:
        """The next plan, to be published to every rank; None if there is nothing to do until something changes.

        A plan without slices only tells the workers whom to forget and what to copy; no result of it is awaited.
        """
        if self._flights.is_full:
            return None
        packing = self._pack(now)
        copies = self.kv.take_copies()
        if not packing.slices and not copies and (self._flights or not self._flights.has_news):
            return None
        self.counters.copy_waits += packing.needs_copies > 0
        return self._flights.start(packing, copies, now)

    def shutdown(self) -> IterationPlan:
        """The last plan: the workers leave their loop."""
        return self._flights.shutdown()

    def update(self, result: IterationResult, now: float) -> list[TokenDelta]:
        """Take the result of the oldest plan in flight: the new tokens, in the order of its slices.

        The result of a plan without slices is ignored. Any other order is a bug and raises ValueError.
        """
        flight = self._land(result, now)
        if flight is None:
            return []
        deltas = self._fail(result.errors)
        samples = zip(result.token_ids, result.logprobs or repeat(None), strict=False)
        prompt_logprobs = dict(result.prompt_logprobs)
        for piece, sequence in zip(flight.slices, flight.sequences, strict=True):
            token_id, logprob = next(samples) if piece.samples else (None, None)
            if sequence.is_finished:
                continue
            reason = self._advance(sequence, piece.num_tokens, token_id, now)
            scores = prompt_logprobs.get(piece.request_id, ()) if prompt_logprobs else ()
            if token_id is not None:
                deltas.append(TokenDelta(piece.request_id, (token_id,), reason, (logprob,) if logprob else (), scores))
            elif scores:
                deltas.append(TokenDelta(piece.request_id, prompt_logprobs=scores))
        return deltas

    def acknowledge(self, copy_id: int) -> None:
        """Every rank has done all copies up to this one."""
        self.kv.acknowledge(copy_id)

    def _pack(self, now: float) -> Packing:
        costs = None if self.cost is None else self.cost.costs
        packing = Packing(
            policy=self.policy,
            kv=self.kv,
            residents=self._residents,
            plan_id=self._flights.last_plan_id + 1,
            last_done=self._flights.last_done,
            max_batch=self.max_batch,
            budget=self.max_batch_tokens,
            share=self._share(),
            room=None if self._slowdown is None else self._slowdown.room(now),
            costs=costs,
        )
        self._residents.now = now
        if self.kv.policy.is_early:
            self._residents.look_ahead(packing.plan_id, self.num_stages, costs)
        packing.fill(now)
        self._is_short_of_blocks = packing.is_short_of_blocks
        self.counters.preemptions = self._residents.num_preempted
        return packing

    def _share(self) -> int:
        """How many sequences one plan takes, so that every stage of the pipeline has work."""
        active = min(len(self._live), self.max_batch)
        if self._is_short_of_blocks:
            active = min(active, len(self._residents.running))
        return max(1, -(-active // self.num_stages))

    def _land(self, result: IterationResult, now: float) -> Flight | None:
        """The plan that the result is for; None for one without slices."""
        flight = self._flights.land(result)
        if flight is None:
            return None
        self.kv.plan_done(flight.plan_id)
        self.counters.iterations += 1
        self.counters.prompt_tokens += flight.num_prompt_tokens
        self._learn(flight, result.compute_s)
        if self._slowdown is not None:
            self._slowdown.landed(now - max(flight.planned_s, self._landed_s), flight.interactive_part)
        self._landed_s = now
        return flight

    def _learn(self, flight: Flight, seconds: float) -> None:
        """What the iteration took in a stage. Those that only decode are much alike: every 16th will do."""
        if self.cost is not None and seconds > 0 and (flight.num_prompt_tokens or flight.plan_id % 16 == 0):
            self.cost.observe(load_of(flight.slices), seconds)

    def _fail(self, errors: tuple[tuple[int, str], ...]) -> list[TokenDelta]:
        """End the requests that cannot go on; those that share KV with them compute their own."""
        live = [(self._live[request_id], error) for request_id, error in errors if request_id in self._live]
        for sequence, _ in live:
            for request_id in self.kv.condemn(sequence):
                self._residents.discard(self._live[request_id])
            self._remove(sequence)
        return [TokenDelta(sequence.request_id, finish_reason="error", error=error) for sequence, error in live]

    def _advance(self, sequence: Sequence, num_tokens: int, token_id: int | None, now: float) -> FinishReason | None:
        """Note what a slice has done; why the sequence ended, if it has."""
        reason = None
        if token_id is not None:
            reason = sequence.accept(token_id)
            self.counters.output_tokens += 1
            if self._slowdown is not None and len(sequence.outputs) == 1:
                self._slowdown.first_token(sequence)
        if reason is None:
            self.policy.on_progress(sequence, num_tokens, now)
        else:
            self._remove(sequence, is_complete=True)
        return reason

    def _remove(self, sequence: Sequence, is_complete: bool = False) -> None:
        request_id = sequence.request_id
        sequence.is_finished = True
        del self._live[request_id]
        self._residents.leave(sequence)
        self.policy.remove(sequence, is_complete)
        if self._slowdown is not None:
            self._slowdown.remove(sequence)
        if sequence.num_held:
            self._flights.forget(request_id)

    def check(self, now: float) -> None:
        """Assert the invariants. Costs as much as the queue is long: for tests."""
        self.kv.check()
        running = self._residents.running
        assert sorted(self.kv.residents()) == sorted(running)
        assert {*running, *self.kv.parked()} <= self._live.keys()
        for sequence in self._live.values():
            sequence.check()
            assert not sequence.is_finished
            if sequence.request_id in running:
                num_blocks = self.kv.num_blocks(sequence.request_id)
                assert num_blocks >= self.kv.blocks_for(sequence.num_planned)
                assert sequence.num_blocks in (0, num_blocks)
            else:
                assert not sequence.num_blocks
        awaited = self._flights.check()
        assert awaited == sorted(s.request_id for s in self._live.values() if s.awaits_sample)
        ranked = list(self.policy.ranked(now))
        assert sorted(sequence.request_id for sequence in ranked) == sorted(self._live)
        assert ranked == sorted(ranked, key=self.policy.order_key)
