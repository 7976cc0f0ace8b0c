"""Random arrivals, aborts and results, under memory pressure: the laws hold after every step (see `scheduling`)."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from scheduling import POLICIES, Ranks, request

from fastserve_hpc.core.cost import CostModel
from fastserve_hpc.core.kv_policy import KV_POLICIES
from fastserve_hpc.errors import RequestError


class SchedulerMachine(RuleBasedStateMachine):
    ranks: Ranks

    @initialize(
        num_stages=st.integers(1, 3),
        block_size=st.sampled_from([1, 2, 4]),
        num_blocks=st.integers(5, 24),
        max_batch=st.integers(1, 8),
        max_batch_tokens=st.integers(1, 32),
        policy=st.sampled_from(sorted(POLICIES)),
        num_host_blocks=st.sampled_from([0, 2, 8, 40]),
        kv_policy=st.sampled_from(sorted(KV_POLICIES)),
        salt=st.sampled_from([None, b"salt"]),
        cost=st.none() | st.builds(CostModel),
    )
    def start(self, **limits: Any) -> None:
        self.ranks = Ranks(**limits)

    @rule(
        lengths=st.lists(st.tuples(st.integers(1, 16), st.integers(1, 24)), min_size=1, max_size=6),
        min_tokens=st.sampled_from([0, 0, 7]),
        prompt_logprobs=st.sampled_from([None, None, 1]),
        scored_from=st.sampled_from([0, 3, 8]),
        stops=st.sampled_from([(256,), (), (32, 256)]),
        shared=st.sampled_from([0, 4, 9]),
        cache_prefix=st.sampled_from([True, True, False]),
    )
    def arrive(self, lengths: list[tuple[int, int]], min_tokens: int, **sampling: Any) -> None:
        for prompt_len, max_tokens in lengths:
            new = request(
                len(self.ranks.requests),
                prompt_len,
                max_tokens,
                min_tokens=min(min_tokens, max_tokens),
                shared=sampling["shared"],
                prompt_logprobs=sampling["prompt_logprobs"],
                prompt_logprobs_from=sampling["scored_from"],
                stop_token_ids=sampling["stops"],
                cache_prefix=sampling["cache_prefix"],
            )
            fits = self.ranks.scheduler.kv.blocks_for(prompt_len + max_tokens - 1) <= self.ranks.scheduler.kv.num_total
            with nullcontext() if fits else pytest.raises(RequestError, match="--device-kv"):
                self.ranks.add(new)

    @rule()
    def schedule(self) -> None:
        self.ranks.schedule()

    @precondition(lambda self: self.ranks.num_in_flight)
    @rule()
    def land(self) -> None:
        self.ranks.land()

    @precondition(lambda self: self.ranks.num_in_flight)
    @rule()
    def land_with_an_error(self) -> None:
        """The first that samples cannot go on."""
        sampling = [piece.request_id for piece in self.ranks.oldest.slices if piece.samples]
        errors = tuple((request_id, "not a number") for request_id in sampling[:1])
        self.ranks.land(lambda r: replace(r, token_ids=(-1, *r.token_ids[1:]) if errors else (), errors=errors))

    @precondition(lambda self: self.ranks.scheduler.request_ids())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.ranks.abort(data.draw(st.sampled_from(self.ranks.scheduler.request_ids())))

    @rule(count=st.integers(1, 6), uploads_first=st.booleans())
    def copy(self, count: int, uploads_first: bool) -> None:
        self.ranks.copy(count, uploads_first)

    @rule(turns=st.integers(1, 12))
    def go_on(self, turns: int) -> None:
        for _ in range(turns):
            if self.ranks.schedule() is None:
                if self.ranks.num_in_flight:
                    self.ranks.land()
                else:
                    self.ranks.copy()

    def teardown(self) -> None:
        if hasattr(self, "ranks"):
            self.ranks.run(max_plans=20_000)


class LongSchedulerMachine(SchedulerMachine):
    """The same for longer."""


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
TestSchedulerLong = pytest.mark.slow(pytest.mark.timeout(900)(LongSchedulerMachine.TestCase))
TestSchedulerLong.settings = settings(max_examples=1000, stateful_step_count=50, deadline=None)
