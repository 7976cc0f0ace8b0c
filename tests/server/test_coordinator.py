"""The loop of rank 0: with one rank, with a second one that answers late, idle, draining, failing."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import request

from fastserve_hpc.core.cost import CostModel
from fastserve_hpc.core.engine import BlockUsage
from fastserve_hpc.core.kv_manager import KvManager
from fastserve_hpc.core.kv_policy import KV_POLICIES
from fastserve_hpc.core.plan import IterationPlan, RankReport, TokenDelta
from fastserve_hpc.core.policy.fcfs import Fcfs
from fastserve_hpc.core.request import Request
from fastserve_hpc.core.scheduler import Scheduler
from fastserve_hpc.parallel.control import LocalControl
from fastserve_hpc.parallel.idle import Backoff
from fastserve_hpc.server.coordinator import IDLE_POLL_S, Coordinator, EngineInfo
from fastserve_hpc.server.job_end import JobEnd
from fastserve_hpc.server.local_queue import queue_pair
from fastserve_hpc.server.queues import EngineCommands, EngineOutput
from fastserve_hpc.worker.fake import FakeWorker, answer

BLOCK_SIZE = 4
NUM_BLOCKS = 64

Turn = EngineCommands | Callable[[], None] | None


class Script:
    """A command queue that plays one entry a turn: commands, something to do, or nothing; then drains."""

    def __init__(self, *turns: Turn):
        self.turns = deque(turns)
        self.outputs: list[EngineOutput] = []
        self.timeouts: list[float] = []

    def poll(self, timeout_s: float = 0.0) -> list[EngineCommands]:
        self.timeouts.append(timeout_s)
        if not self.turns:
            return [EngineCommands(drain="finish")]
        entry = self.turns.popleft()
        if isinstance(entry, EngineCommands):
            return [entry]
        if entry is not None:
            entry()
        return []

    def send(self, output: EngineOutput) -> None:
        assert output != EngineOutput(), "an empty message"
        self.outputs.append(output)

    def interrupt(self) -> None:
        """Nobody waits."""

    @property
    def deltas(self) -> list[TokenDelta]:
        return [delta for output in self.outputs for delta in output.deltas]

    def tokens(self, request_id: int) -> tuple[int, ...]:
        return tuple(t for delta in self.deltas if delta.request_id == request_id for t in delta.token_ids)

    @property
    def reasons(self) -> dict[int, str]:
        return {delta.request_id: delta.finish_reason for delta in self.deltas if delta.finish_reason is not None}

    @property
    def states(self) -> list[str]:
        return [output.state for output in self.outputs if output.state is not None]


class SecondRank:
    """The control plane to the last stage, which computes a plan `lag` looks after it was published."""

    def __init__(self, lag: int = 3):
        self.worker = FakeWorker(BLOCK_SIZE, NUM_BLOCKS, rank=1)
        self.published: list[IterationPlan] = []
        self.max_waiting = 0
        self._lag = lag
        self._looks = 0
        self._waiting: deque[tuple[int, IterationPlan]] = deque()

    def publish(self, plan: IterationPlan) -> None:
        self.published.append(plan)
        self._waiting.append((self._looks + self._lag, plan))
        self.max_waiting = max(self.max_waiting, sum(bool(plan.slices) for _, plan in self._waiting))

    def collect(self) -> list[RankReport]:
        self._looks += 1
        reports = []
        while self._waiting and self._waiting[0][0] <= self._looks:
            reports.append(self.worker.execute(self._waiting.popleft()[1]))
        return reports

    def close(self) -> None:
        """Nothing is under way."""


class CountedBackoff:
    def __init__(self) -> None:
        self.num_pauses = 0

    def pause(self) -> None:
        self.num_pauses += 1

    def reset(self) -> None:
        """Begins anew."""


class Clock:
    """Seconds that pass as told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Setup:
    """A coordinator and all that it is given."""

    def __init__(
        self,
        *turns: Turn,
        second: SecondRank | None = None,
        clock: Callable[[], float] = time.monotonic,
        check_abort: Callable[[], None] = lambda: None,
        num_blocks: int = NUM_BLOCKS,
        num_host_blocks: int = 0,
        kv_policy: str = "recompute",
        job_end: JobEnd | None = None,
    ):
        self.queue = Script(*turns)
        self.news: list[str] = []
        self.second = second
        self.worker = FakeWorker(BLOCK_SIZE, num_blocks, has_result=second is None)
        self.backoff = CountedBackoff()
        num_stages = 1 if second is None else 2
        kv = KvManager(num_blocks, BLOCK_SIZE, num_host_blocks, policy=KV_POLICIES[kv_policy])
        self.scheduler = Scheduler(Fcfs(), kv, max_batch=8, max_batch_tokens=32, num_stages=num_stages)
        self.coordinator = Coordinator(
            self.scheduler,
            second or LocalControl(),
            self.worker,
            self.queue,
            EngineInfo("fake", 512, pp=num_stages),
            self.backoff,
            drain_s=10.0,
            check_abort=check_abort,
            say=self.news.append,
            clock=clock,
            job_end=job_end,
        )

    def run(self) -> Script:
        self.coordinator.run()
        assert self.queue.states[0] == "ready"
        assert self.queue.states[-1] == "ended"
        assert self.queue.outputs[-1] == EngineOutput(state="ended")
        assert self.scheduler.is_idle
        assert self.scheduler.kv.num_used == 0
        assert self.worker.request_ids == []
        return self.queue


def submit(*requests: Request) -> EngineCommands:
    return EngineCommands(requests=list(requests))


def right_answers(queue: Script, requests: Iterable[Request]) -> bool:
    return all(queue.tokens(r.request_id) == answer(r.prompt, r.sampling) for r in requests)


@pytest.mark.parametrize("kv_policy", ["proactive", "reactive"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_blocks_that_were_moved_are_used_again_once_all_ranks_say_so(num_ranks: int, kv_policy: str) -> None:
    requests = [request(i, prompt_len=8, max_tokens=30, stop_token_ids=()) for i in range(8)]
    second = SecondRank() if num_ranks == 2 else None
    setup = Setup(submit(*requests), second=second, num_blocks=24, num_host_blocks=64, kv_policy=kv_policy)
    assert right_answers(setup.run(), requests)
    kv = setup.scheduler.kv
    assert kv.num_offloaded > 0
    assert kv.counters.recomputed_tokens == 0
    assert setup.coordinator.status().host_blocks == BlockUsage(64, 0)


def test_one_rank_streams_every_token_as_it_comes() -> None:
    requests = [request(i, max_tokens=5 + i, stop_token_ids=()) for i in range(3)]
    queue = Setup(submit(*requests)).run()
    assert right_answers(queue, requests)
    assert queue.reasons == dict.fromkeys(range(3), "length")
    assert max(len(output.deltas) for output in queue.outputs) == 3, "one message an iteration"
    assert queue.states == ["ready", "draining", "ended"]


def test_a_second_rank_keeps_two_plans_in_flight() -> None:
    requests = [request(i, max_tokens=20) for i in range(6)]
    second = SecondRank(lag=5)
    setup = Setup(submit(*requests), second=second)
    queue = setup.run()
    assert right_answers(queue, requests)
    assert second.max_waiting == 2
    assert setup.backoff.num_pauses > 0, "it must not spin while results are awaited"
    assert second.published[-1].shutdown
    assert [plan.plan_id for plan in second.published] == list(range(1, len(second.published) + 1))


def test_progress_streams_while_the_rank_computes_and_does_not_schedule() -> None:
    second = SecondRank(lag=1)
    setup = Setup(submit(*(request(i, max_tokens=6, stop_token_ids=()) for i in range(4))), second=second)
    execute, seen = setup.worker.execute, []

    def execute_with_hook(plan: IterationPlan) -> RankReport:
        before = len(second.published), len(setup.queue.deltas)
        setup.coordinator.progress()
        assert len(second.published) == before[0]
        seen.append(len(setup.queue.deltas) - before[1])
        return execute(plan)

    setup.worker.execute = execute_with_hook  # type: ignore[method-assign]
    setup.run()
    assert sum(seen) > 0


def test_a_cancelled_request_is_not_heard_of_again() -> None:
    requests = [request(i, max_tokens=30, stop_token_ids=()) for i in range(2)]
    cancel = EngineCommands(cancelled=[0, 77])
    queue = Setup(submit(*requests), None, cancel).run()
    last = max(i for i, output in enumerate(queue.outputs) if any(d.request_id == 0 for d in output.deltas))
    assert queue.reasons == {1: "length"}
    assert len(queue.tokens(0)) == 2
    assert last < len(queue.outputs) - 20


def test_submitted_and_cancelled_in_one_message_leaves_nothing() -> None:
    queue = Setup(EngineCommands(requests=[request(1)], cancelled=[1])).run()
    assert queue.deltas == []


def test_a_request_that_never_fits_is_told_why() -> None:
    queue = Setup(submit(request(1, prompt_len=30, max_tokens=40), request(2, max_tokens=3)), num_blocks=16).run()
    refusal = next(delta for delta in queue.deltas if delta.request_id == 1)
    assert refusal.finish_reason == "error"
    assert refusal.error_code == "context_length_exceeded"
    assert refusal.error is not None
    assert "need 18 KV blocks" in refusal.error
    assert queue.reasons[2] in ("length", "stop")


def test_status() -> None:
    clock = Clock()
    requests = [request(i, prompt_len=5, max_tokens=8, stop_token_ids=()) for i in range(9)]

    def later() -> None:
        clock.now += 2.5

    queue = Setup(submit(*requests), later, None, EngineCommands(wants_status=True), clock=clock).run()
    (status,) = [output.status for output in queue.outputs if output.status is not None]
    assert (status.state, status.model, status.max_model_len, status.policy) == ("ready", "fake", 512, "fcfs")
    assert (status.world_size, status.tp, status.pp) == (1, 1, 1)
    assert (status.running, status.waiting, status.preemptions) == (8, 1, 0)
    assert (status.device_blocks, status.host_blocks) == (BlockUsage(NUM_BLOCKS, 16), BlockUsage(0, 0))
    assert (status.uptime_s, status.iterations) == (2.5, 3)
    assert (status.prompt_tokens, status.output_tokens) == (40, 6 + 8 + 8)
    assert status.details["min_free_bytes"] == 2**30


class TestDrain:
    def test_finish_ends_what_was_taken_and_refuses_the_rest(self) -> None:
        drain = EngineCommands(drain="finish", requests=[request(2)])
        setup = Setup(submit(request(1, max_tokens=9, stop_token_ids=())), None, drain, submit(request(3)))
        queue = setup.run()
        assert queue.reasons[1] == "length"
        assert queue.reasons[2] in ("length", "stop"), "it came before the drain"
        refusal = next(delta for delta in queue.deltas if delta.request_id == 3)
        assert (refusal.finish_reason, refusal.error_code) == ("error", "draining")
        assert setup.coordinator.num_cancelled == 0
        assert queue.states == ["ready", "draining", "ended"]

    @pytest.mark.parametrize("second", [None, SecondRank()])
    def test_now_cancels_everything(self, second: SecondRank | None) -> None:
        requests = [request(i, max_tokens=50, stop_token_ids=()) for i in range(12)]
        setup = Setup(submit(*requests), None, EngineCommands(drain="now"), second=second)
        queue = setup.run()
        assert queue.reasons == dict.fromkeys(range(12), "cancelled")
        assert setup.coordinator.num_cancelled == 12

    def test_finish_is_bounded(self) -> None:
        clock = Clock()

        def later() -> None:
            clock.now += 9.0

        turns = (None, EngineCommands(drain="finish"), later, None, later, None)
        setup = Setup(submit(request(1, max_tokens=200, stop_token_ids=())), *turns, clock=clock)
        queue = setup.run()
        assert queue.reasons == {1: "cancelled"}
        assert len(queue.tokens(1)) == 5
        assert setup.news == [
            "ending: 1 request may take 10 s to finish",
            "1 request could not finish before the end",
        ]

    def test_an_idle_server_ends_without_news(self) -> None:
        setup = Setup(EngineCommands(drain="finish"))
        setup.run()
        assert setup.news == []

    def test_now_after_finish(self) -> None:
        turns = (EngineCommands(drain="finish"), None, EngineCommands(drain="now"))
        queue = Setup(submit(request(1, max_tokens=200, stop_token_ids=())), *turns).run()
        assert queue.reasons == {1: "cancelled"}
        assert queue.states == ["ready", "draining", "ended"]

    def test_who_asks_may_know_that_less_time_is_left(self) -> None:
        clock = Clock()
        setup = Setup(submit(request(1, max_tokens=200, stop_token_ids=())), clock=clock)

        def later() -> None:
            clock.now += 2.0

        setup.queue.turns += [lambda: setup.coordinator.request_drain("finish", 3.75), later, later, None]
        assert setup.run().reasons == {1: "cancelled"}
        assert setup.news[0] == "ending: 1 request may take 3.8 s to finish"
        assert clock.now == 104.0

    def test_the_end_of_the_job_is_reason_enough(self) -> None:
        clock = Clock()

        def later() -> None:
            clock.now += 10.0

        end = JobEnd(at=120.0, drain_at=110.0, cost=CostModel())
        turns = (None, later, submit(request(2)), None)
        setup = Setup(submit(request(1, max_tokens=9, stop_token_ids=())), *turns, clock=clock, job_end=end)
        queue = setup.run()
        assert queue.reasons == {1: "length", 2: "error"}
        assert setup.news[0] == "the time limit ends this job in 10 s"

    def test_what_cannot_be_finished_before_the_end_of_the_job_is_refused(self) -> None:
        cost = CostModel()
        cost.num_observed = 1000
        end = JobEnd(at=101.0, drain_at=200.0, cost=cost)
        requests = (request(1, max_tokens=9), request(2, max_tokens=400, stop_token_ids=()))
        queue = Setup(submit(*requests), clock=Clock(), job_end=end).run()
        refusal = next(delta for delta in queue.deltas if delta.request_id == 2)
        assert refusal.error_code == "job_ending"
        assert queue.reasons[1] in ("length", "stop")

    def test_another_thread_may_ask(self) -> None:
        setup = Setup(submit(request(1, max_tokens=200, stop_token_ids=())))

        def ask() -> None:
            thread = threading.Thread(target=setup.coordinator.request_drain, args=["now"])
            thread.start()
            thread.join()

        setup.queue.turns.append(ask)
        assert setup.run().reasons == {1: "cancelled"}


def test_ready_comes_before_on_ready_and_commands() -> None:
    setup = Setup()
    seen: list[list[str]] = []
    setup.coordinator.run(on_ready=lambda: seen.append(list(setup.queue.states)))
    assert seen == [["ready"]]


def test_what_the_worker_raises_goes_to_the_caller() -> None:
    setup = Setup(submit(request(1)))

    def execute(plan: IterationPlan) -> RankReport:
        raise OSError(f"device lost in plan {plan.plan_id}")

    setup.worker.execute = execute  # type: ignore[method-assign]
    with pytest.raises(OSError, match="device lost in plan 1"):
        setup.coordinator.run()
    assert setup.queue.states == ["ready"]


def test_a_lost_rank_ends_the_wait_for_its_results() -> None:
    second = SecondRank(lag=10**9)
    num_checks = 0

    def check_abort() -> None:
        nonlocal num_checks
        num_checks += 1
        if num_checks > 50:
            raise RuntimeError("rank 1 is gone")

    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        Setup(submit(request(1)), second=second, check_abort=check_abort).run()


def test_idle_it_waits_for_commands_and_busy_it_does_not() -> None:
    queue = Setup(None, None, None, submit(request(1, max_tokens=3, stop_token_ids=())), None, None).run()
    assert queue.timeouts[:4] == [0.0, IDLE_POLL_S, IDLE_POLL_S, IDLE_POLL_S]
    assert queue.timeouts[4:] == [0.0, 0.0, 0.0]


def test_over_a_real_queue_idle_is_cheap_and_a_drain_is_heard() -> None:
    ours, theirs = queue_pair()
    setup = Setup()
    coordinator = Coordinator(
        setup.scheduler, LocalControl(), setup.worker, ours, EngineInfo("fake", 512), Backoff(), drain_s=5.0
    )
    cpu: list[float] = []

    def run() -> None:
        begin = time.thread_time()
        coordinator.run()
        cpu.append(time.thread_time() - begin)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        theirs.send(submit(request(1, max_tokens=4, stop_token_ids=())))
        time.sleep(1.0)
    finally:
        told_at = time.monotonic()
        coordinator.request_drain("finish")
        thread.join(timeout=5.0)
    assert time.monotonic() - told_at < IDLE_POLL_S / 2
    assert not thread.is_alive()
    outputs = theirs.receive()
    assert [d.request_id for output in outputs for d in output.deltas] == [1] * 4
    assert outputs[-1].state == "ended"
    assert cpu[0] < 0.1


lengths = st.lists(st.integers(1, 30), min_size=1, max_size=5)
entries = st.one_of(
    st.none(),
    lengths,
    st.builds(lambda request_id: EngineCommands(cancelled=[request_id]), st.integers(0, 40)),
    st.builds(lambda mode: EngineCommands(drain=mode), st.sampled_from(["finish", "now"])),
    st.just(EngineCommands(wants_status=True)),
)


def as_commands(script: list[list[int] | EngineCommands | None]) -> list[EngineCommands | None]:
    """Lists of lengths become submits of requests with ids from 0."""
    commands: list[EngineCommands | None] = []
    num_requests = 0
    for entry in script:
        if isinstance(entry, list):
            fresh = [request(num_requests + i, prompt_len=n, max_tokens=n) for i, n in enumerate(entry)]
            num_requests += len(fresh)
            commands.append(submit(*fresh))
        else:
            commands.append(entry)
    return commands


@settings(max_examples=60, deadline=None)
@given(script=st.lists(entries, max_size=40), lag=st.none() | st.integers(1, 6), num_blocks=st.integers(8, 40))
def test_every_request_gets_its_answer_and_one_end_or_was_cancelled(
    script: list[list[int] | EngineCommands | None], lag: int | None, num_blocks: int
) -> None:
    commands = as_commands(script)
    queue = Setup(*commands, second=None if lag is None else SecondRank(lag), num_blocks=num_blocks).run()
    read = [c for c in commands[: len(commands) - len(queue.turns)] if c is not None]
    requests = {r.request_id: r for c in read for r in c.requests}
    cancelled = {request_id for c in read for request_id in c.cancelled}
    ends = [delta.request_id for delta in queue.deltas if delta.finish_reason is not None]
    assert len(ends) == len(set(ends))
    assert requests.keys() - cancelled <= set(ends) <= requests.keys()
    for request_id, wanted in requests.items():
        tokens, whole = queue.tokens(request_id), answer(wanted.prompt, wanted.sampling)
        assert tokens == whole[: len(tokens)]
        assert queue.reasons.get(request_id) not in ("stop", "length") or tokens == whole
