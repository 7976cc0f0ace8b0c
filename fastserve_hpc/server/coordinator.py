"""The main loop of rank 0: commands in, plans out, results in, tokens out.

One turn: take the commands that have come, schedule, publish, compute this rank's part, take what the
other ranks report, stream the new tokens. Up to `num_stages` plans are in flight. Whatever the
scheduler, the worker or a queue raises goes to the caller: a rank that fails must end the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

from fastserve_hpc.core.engine import BlockUsage, EngineState, EngineStatus
from fastserve_hpc.core.plan import IterationPlan, RankReport, TokenDelta
from fastserve_hpc.core.request import Request
from fastserve_hpc.core.scheduler import Scheduler
from fastserve_hpc.errors import RequestError
from fastserve_hpc.parallel.control import Control
from fastserve_hpc.server.job_end import JobEnd
from fastserve_hpc.server.queues import DrainMode, EngineCommands, EngineOutput

IDLE_POLL_S = 1.0
"""How long an idle coordinator sleeps, unless a command or a drain comes."""


class Worker(Protocol):
    """This rank's part of the model."""

    def execute(self, plan: IterationPlan) -> RankReport: ...

    def report(self) -> RankReport: ...


class CommandQueue(Protocol):
    """The way to the front end (`server.local_queue.CoordinatorQueue`)."""

    def poll(self, timeout_s: float = 0.0) -> list[EngineCommands]: ...

    def send(self, output: EngineOutput) -> None: ...

    def interrupt(self) -> None: ...


class Backoff(Protocol):
    """Pauses that grow until there was work (`parallel.idle.Backoff`)."""

    def pause(self) -> None: ...

    def reset(self) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a status says of the run and never changes."""

    model: str
    max_model_len: int
    tp: int = 1
    pp: int = 1
    vocab_size: int = 0


class Coordinator:
    """Owns the scheduler and the way of every request through the ranks."""

    def __init__(
        self,
        scheduler: Scheduler,
        control: Control,
        worker: Worker,
        queue: CommandQueue,
        info: EngineInfo,
        backoff: Backoff,
        *,
        drain_s: float = 25.0,
        check_abort: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        job_end: JobEnd | None = None,
    ):
        """`check_abort` is called every turn and raises when the run is to end; `drain_s` bounds a drain.

        `job_end` is when the time limit ends the Slurm job, if there is one. `say` takes news for the log.
        """
        self._scheduler = scheduler
        self._control = control
        self._worker = worker
        self._queue = queue
        self._info = info
        self._backoff = backoff
        self._drain_s = drain_s
        self._check_abort = check_abort
        self._say = say
        self._clock = clock
        self._job_end = job_end
        self._started = clock()
        self._state: EngineState = "starting"
        self._drains: SimpleQueue[tuple[DrainMode, float]] = SimpleQueue()
        self._deadline = float("inf")
        self._num_cancelled = 0
        self._deltas: list[TokenDelta] = []
        self._reports: dict[int, RankReport] = {}

    @property
    def num_cancelled(self) -> int:
        """Requests that a drain did not let finish."""
        return self._num_cancelled

    def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Serve until a drain is over; then the workers have their last plan and the front end its last message.

        `on_ready` is called once the front end has been told that requests may come.
        """
        self._enter("ready")
        on_ready()
        has_worked = True
        while self._state == "ready" or not self._scheduler.is_idle:
            self._check_abort()
            self._take_commands(self._pause(has_worked))
            self._take_drains()
            has_worked = self._iterate()
        self._end()

    def request_drain(self, mode: DrainMode, within_s: float = float("inf")) -> None:
        """Ask for the end, from any thread: "finish" what was taken, within `drain_s` and `within_s`, or "now"."""
        self._drains.put((mode, self._clock() + within_s))
        self._queue.interrupt()

    def progress(self) -> None:
        """Take in what ranks have reported and stream the tokens.

        The data plane calls it between the layers while `execute` computes: it never schedules.
        """
        self._collect()

    def status(self) -> EngineStatus:
        """A snapshot."""
        scheduler, counters = self._scheduler, self._scheduler.counters
        return EngineStatus(
            state=self._state,
            model=self._info.model,
            max_model_len=self._info.max_model_len,
            world_size=self._info.tp * self._info.pp,
            tp=self._info.tp,
            pp=self._info.pp,
            policy=scheduler.policy.name,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            device_blocks=BlockUsage(scheduler.kv.num_total, scheduler.kv.num_used),
            host_blocks=BlockUsage(scheduler.kv.num_host_total, scheduler.kv.num_host_used),
            preemptions=counters.preemptions,
            uptime_s=self._clock() - self._started,
            vocab_size=self._info.vocab_size,
            iterations=counters.iterations,
            prompt_tokens=counters.prompt_tokens,
            output_tokens=counters.output_tokens,
            details=self._details(),
        )

    def _details(self) -> dict[str, float]:
        reports = self._reports.values()
        energy_j = sum(report.energy_j for report in reports)
        own = {
            "plans_in_flight": self._scheduler.num_in_flight,
            "min_free_bytes": min((report.free_bytes for report in reports), default=0),
            "stall_s": max((report.stall_s for report in reports), default=0.0),
            **({"energy_j": energy_j} if energy_j else {}),
        }
        return {**own, **self._scheduler.details()}

    def _pause(self, has_worked: bool) -> list[EngineCommands]:
        """Sleep as long as fits the moment, and what commands have come."""
        if has_worked:
            self._backoff.reset()
            return self._queue.poll()
        if self._scheduler.is_idle:
            return self._queue.poll(IDLE_POLL_S)
        self._backoff.pause()
        return self._queue.poll()

    def _iterate(self) -> bool:
        """One plan, if there is something to do; whether anything was done."""
        plan = self._scheduler.schedule(self._clock())
        if plan is not None:
            self._control.publish(plan)
            self._take_report(self._worker.execute(plan))
        elif self._scheduler.kv.copies_in_flight:
            self._take_report(self._worker.report())
        return self._collect() or plan is not None

    def _collect(self) -> bool:
        reports = self._control.collect()
        for report in reports:
            self._take_report(report)
        self._flush()
        return bool(reports)

    def _take_report(self, report: RankReport) -> None:
        self._reports[report.rank] = report
        if self._scheduler.kv.copies_in_flight and len(self._reports) == self._info.tp * self._info.pp:
            self._scheduler.acknowledge(min(known.copies_done for known in self._reports.values()))
        if report.result is not None:
            self._deltas += self._scheduler.update(report.result, self._clock())

    def _take_commands(self, messages: list[EngineCommands]) -> None:
        for commands in messages:
            for request in commands.requests:
                self._add(request)
            for request_id in commands.cancelled:
                self._scheduler.abort(request_id, self._clock())
            for request_id, slowdown in commands.slowdowns.items():
                self._scheduler.set_slowdown(request_id, slowdown)
            if commands.wants_status:
                self._queue.send(EngineOutput(status=self.status()))
            if commands.drain is not None:
                self._drain(commands.drain)

    def _add(self, request: Request) -> None:
        try:
            if self._state != "ready":
                raise RequestError("the server is draining and takes no more requests", code="draining")
            if self._job_end is not None:
                self._job_end.check(request, self._clock())
            self._scheduler.add(request, self._clock())
        except RequestError as error:
            refusal = TokenDelta(request.request_id, finish_reason="error", error=str(error), error_code=error.code)
            self._deltas.append(refusal)

    def _take_drains(self) -> None:
        try:
            while True:
                self._drain(*self._drains.get_nowait())
        except Empty:
            pass
        now = self._clock()
        if self._job_end is not None and self._state == "ready" and now >= self._job_end.drain_at:
            self._say(f"the time limit ends this job in {max(0, self._job_end.at - now):.0f} s")
            self._drain("finish")
        if now >= self._deadline:
            self._cancel_all()

    def _drain(self, mode: DrainMode, latest: float = float("inf")) -> None:
        if self._state == "ready":
            self._enter("draining")
            now = self._clock()
            self._deadline = min(now + self._drain_s, latest)
            if mode == "finish" and (unfinished := len(self._scheduler.request_ids())):
                left_s = round(max(0.0, self._deadline - now), 1)
                self._say(f"ending: {_requests(unfinished)} may take {left_s:g} s to finish")
        if mode == "now":
            self._cancel_all()

    def _cancel_all(self) -> None:
        for request_id in self._scheduler.request_ids():
            self._scheduler.abort(request_id, self._clock())
            self._deltas.append(TokenDelta(request_id, finish_reason="cancelled"))
            self._num_cancelled += 1

    def _enter(self, state: EngineState) -> None:
        self._state = state
        self._flush()
        limit = self._info.max_model_len if state == "ready" else None
        self._queue.send(EngineOutput(state=state, max_model_len=limit))

    def _flush(self) -> None:
        if self._deltas:
            deltas, self._deltas = self._deltas, []
            self._queue.send(EngineOutput(deltas=deltas))

    def _end(self) -> None:
        if self._num_cancelled:
            self._say(f"{_requests(self._num_cancelled)} could not finish before the end")
        plan = self._scheduler.shutdown()
        self._control.publish(plan)
        self._worker.execute(plan)
        self._enter("ended")


def _requests(count: int) -> str:
    return f"{count} request{'s' if count > 1 else ''}"
