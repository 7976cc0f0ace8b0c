"""Scheduler and workers together: preempted, chunked, pipelined and mixed requests get the answers they get alone."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st
from worker.tiny import BLOCK_SIZE, VOCAB_SIZE, Link, make_worker

from fastserve_hpc.core.kv_manager import KvManager
from fastserve_hpc.core.plan import IterationPlan, TokenDelta, TokenLogprobs
from fastserve_hpc.core.policy.fcfs import Fcfs
from fastserve_hpc.core.request import Request, SamplingParams
from fastserve_hpc.core.scheduler import Scheduler
from fastserve_hpc.parallel.topology import Topology


@dataclass
class Answer:
    """What a client gets."""

    token_ids: list[int] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)
    scores: list[TokenLogprobs | None] = field(default_factory=list)
    finish_reason: str | None = None

    def take(self, delta: TokenDelta) -> None:
        assert self.finish_reason is None
        self.token_ids += delta.token_ids
        self.top_ids += [[token_id for token_id, _ in entry.top] for entry in delta.logprobs]
        self.scores += delta.prompt_logprobs
        self.finish_reason = delta.finish_reason


class Engine:
    """A coordinator's turn, over all stages of a pipeline in one process."""

    def __init__(self, num_blocks: int = 256, max_batch: int = 8, max_batch_tokens: int = 64, num_stages: int = 1):
        kv = KvManager(num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(
            Fcfs(), kv, max_batch=max_batch, max_batch_tokens=max_batch_tokens, num_stages=num_stages
        )
        link = Link()
        self.workers = [
            make_worker(Topology(rank, 1, num_stages), link, num_blocks, 0, max_batch_tokens, max_batch)
            for rank in range(num_stages)
        ]
        self.in_flight: deque[IterationPlan] = deque()
        self.answers: dict[int, Answer] = {}

    def add(self, request: Request) -> None:
        self.answers[request.request_id] = Answer()
        self.scheduler.add(request, 0.0)

    def turn(self) -> None:
        """Schedule once; the last stage lags behind as far as plans may be in flight."""
        plan = self.scheduler.schedule(0.0)
        if plan is not None:
            for worker in self.workers[:-1]:
                assert worker.execute(plan).result is None
            self.in_flight.append(plan)
        if plan is None or self.scheduler.num_in_flight >= self.scheduler.num_stages:
            self.finish_one()
        self.scheduler.check(0.0)

    def finish_one(self) -> None:
        if self.in_flight:
            result = self.workers[-1].execute(self.in_flight.popleft()).result
            assert result is not None
            for delta in self.scheduler.update(result, 0.0):
                self.answers[delta.request_id].take(delta)

    def run(self) -> None:
        while not self.scheduler.is_idle or self.in_flight:
            self.turn()


def alone(request: Request) -> Answer:
    engine = Engine()
    engine.add(request)
    engine.run()
    return engine.answers[request.request_id]


params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 20),
    temperature=st.sampled_from([0.0, 0.8, 1.5]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    min_tokens=st.just(1),
    stop_token_ids=st.sampled_from([(), (3, 4, 5)]),
    seed=st.integers(0, 9),
    logprobs=st.sampled_from([None, 2]),
    prompt_logprobs=st.sampled_from([None, 1]),
)
prompts = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=30).map(tuple)


@settings(max_examples=15, deadline=None)
@given(data=st.data(), sampling=st.lists(params, min_size=2, max_size=6), num_stages=st.sampled_from([1, 2]))
def test_every_request_gets_the_answer_it_gets_alone(
    data: st.DataObject, sampling: list[SamplingParams], num_stages: int
) -> None:
    requests = [Request(i, data.draw(prompts), p, choice=i % 3) for i, p in enumerate(sampling, start=1)]
    engine = Engine(
        num_blocks=data.draw(st.integers(13, 24)),
        max_batch=data.draw(st.integers(1, 6)),
        max_batch_tokens=data.draw(st.integers(1, 40)),
        num_stages=num_stages,
    )
    aborted = set()
    for request in requests:
        engine.add(request)
        for _ in range(data.draw(st.integers(0, 8))):
            engine.turn()
        if data.draw(st.integers(0, 5)) == 0:
            aborted.add(request.request_id)
            engine.scheduler.abort(request.request_id, 0.0)
    engine.run()
    for request in requests:
        answer, expected = engine.answers[request.request_id], alone(request)
        if request.request_id in aborted and answer.finish_reason is None:
            assert answer.token_ids == expected.token_ids[: len(answer.token_ids)]
        else:
            assert answer == expected


def test_preemption_by_a_full_cache_changes_nothing() -> None:
    sampling = SamplingParams(max_tokens=24, temperature=0.9, seed=1, logprobs=1, prompt_logprobs=1)
    requests = [Request(i, tuple(range(i, i + 10)), replace(sampling, seed=i, min_tokens=24)) for i in range(1, 5)]
    engine = Engine(num_blocks=16)
    for request in requests:
        engine.add(request)
    engine.run()
    assert engine.scheduler.counters.preemptions > 0
    assert engine.scheduler.kv.num_used == 0
    assert all(engine.answers[request.request_id] == alone(request) for request in requests)
