"""SmolLM2 in bf16 with the C++ kernels: a request's bits are its own, whatever runs beside it and however it is cut."""

from __future__ import annotations

from collections import deque
from functools import cache

import pytest
import torch
from worker.tiny import Link

from fastserve_hpc.core.kv_manager import KvManager
from fastserve_hpc.core.plan import IterationPlan
from fastserve_hpc.core.policy.fcfs import Fcfs
from fastserve_hpc.core.request import Request, SamplingParams
from fastserve_hpc.core.scheduler import Scheduler
from fastserve_hpc.models.decoder import Model
from fastserve_hpc.models.loader import load_model
from fastserve_hpc.models.locate import locate
from fastserve_hpc.models.spec import load_spec
from fastserve_hpc.ops import find_kernels, for_device
from fastserve_hpc.parallel.single import SingleComm
from fastserve_hpc.parallel.topology import Topology
from fastserve_hpc.worker.kv_cache import KVCache, KVShape, KVSize
from fastserve_hpc.worker.memory_watch import MemoryWatch
from fastserve_hpc.worker.worker import Worker

NUM_BLOCKS = 300
MAX_LEN = 640

Answer = list[tuple[int, float, tuple[tuple[int, float], ...]]]
"""(token id, its log-probability, the most likely ones) of each position."""


@cache
def stages(num_stages: int) -> list[Model]:
    files = locate("smollm2-135m")
    spec = load_spec(files.path)
    kernels = find_kernels(16, spec.head_dim, 2)
    if isinstance(kernels, str):
        pytest.skip(kernels)
    chosen = for_device(torch.device("cpu"), "bfloat16", kernels)
    places = [Topology(rank, 1, num_stages) for rank in range(num_stages)]
    return [load_model(files, spec, place, SingleComm(), chosen.dtype, ops=chosen.ops) for place in places]


class Server:
    """Scheduler and workers of all stages, in one process."""

    def __init__(self, max_batch_tokens: int = 512, num_stages: int = 1):
        self._scheduler = Scheduler(
            Fcfs(),
            KvManager(NUM_BLOCKS, 16),
            max_batch=32,
            max_batch_tokens=max_batch_tokens,
            num_stages=num_stages,
        )
        link = Link()
        self._workers = [self._worker(model, rank, num_stages, link) for rank, model in enumerate(stages(num_stages))]
        self._in_flight: deque[IterationPlan] = deque()
        self.answers: dict[int, Answer] = {}

    def _worker(self, model: Model, rank: int, num_stages: int, link: Link) -> Worker:
        place = Topology(rank, 1, num_stages)
        shape = KVShape.of(model.spec, place, 16, torch.bfloat16)
        cache = KVCache(shape, KVSize(NUM_BLOCKS, 0), torch.device("cpu"))
        memory = MemoryWatch(lambda: 0)
        return Worker(model, cache, place, link, memory, max_tokens=512, max_seqs=32, max_model_len=MAX_LEN)

    def add(self, request: Request) -> None:
        self.answers[request.request_id] = []
        self._scheduler.add(request, 0.0)

    def turn(self) -> None:
        plan = self._scheduler.schedule(0.0)
        if plan is not None:
            for worker in self._workers[:-1]:
                worker.execute(plan)
            self._in_flight.append(plan)
        if self._in_flight and (plan is None or self._scheduler.num_in_flight >= self._scheduler.num_stages):
            result = self._workers[-1].execute(self._in_flight.popleft()).result
            assert result is not None
            for delta in self._scheduler.update(result, 0.0):
                self.answers[delta.request_id] += [(e.token_id, e.logprob, e.top) for e in delta.logprobs]

    def run(self) -> None:
        while not self._scheduler.is_idle or self._in_flight:
            self.turn()


def request(request_id: int, num_tokens: int, max_tokens: int = 12) -> Request:
    prompt = tuple((request_id * 977 + i * 131) % 40000 + 500 for i in range(num_tokens))
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.9 * (request_id % 2), seed=request_id, logprobs=3)
    return Request(request_id, prompt, sampling)


LONG, SHORT = request(1, 530), request(2, 21)


def answers(*requests: Request, max_batch_tokens: int = 512, num_stages: int = 1) -> list[Answer]:
    """Of the first two requests, with the others beside them."""
    server = Server(max_batch_tokens, num_stages)
    for item in requests:
        server.add(item)
    server.run()
    return [server.answers[item.request_id] for item in requests[:2]]


@cache
def alone() -> list[Answer]:
    found = [answers(LONG)[0], answers(SHORT)[0]]
    assert [len(answer) for answer in found] == [12, 12]
    return found


@pytest.mark.timeout(300)
def test_among_31_others() -> None:
    others = [request(3 + i, 3 + 7 * i % 60, max_tokens=1 + i % 15) for i in range(30)]
    assert answers(LONG, SHORT, *others) == alone()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("max_batch_tokens", [7, 64])
def test_prompts_in_chunks(max_batch_tokens: int) -> None:
    assert answers(LONG, SHORT, max_batch_tokens=max_batch_tokens) == alone()


@pytest.mark.timeout(300)
def test_two_stages() -> None:
    assert answers(LONG, SHORT, request(3, 40), max_batch_tokens=100, num_stages=2) == alone()


@pytest.mark.timeout(300)
def test_requests_arriving_in_between() -> None:
    server = Server(max_batch_tokens=100)
    server.add(LONG)
    for number in (3, 4):
        server.turn()
        server.turn()
        server.add(request(number, 50))
    server.add(SHORT)
    server.run()
    assert [server.answers[1], server.answers[2]] == alone()
