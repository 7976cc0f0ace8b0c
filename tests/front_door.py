"""A front door for tests: the real ingress process, and a coordinator's end of its queue with a toy engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import zmq

from fastserve_hpc import protocol
from fastserve_hpc.core.engine import BlockUsage, EngineStatus
from fastserve_hpc.core.plan import TokenDelta
from fastserve_hpc.core.request import FinishReason, ModelLimits, Request
from fastserve_hpc.dealer import prepare
from fastserve_hpc.endpoint import Endpoint, endpoints_dir, file_of, load
from fastserve_hpc.protocol import ToClient
from fastserve_hpc.server.ingress_process import IngressProcess
from fastserve_hpc.server.local_queue import CoordinatorQueue, IngressError
from fastserve_hpc.server.queues import DrainMode, EngineCommands, EngineOutput, IngressSettings

EOS = 256
VOCAB_SIZE = 259

Answer = Callable[[Request], Sequence[int]]


def settings(**changes: Any) -> IngressSettings:
    values: dict[str, Any] = {
        "model": "fake",
        "model_path": None,
        "limits": ModelLimits(VOCAB_SIZE, 100_000, (EOS,)),
        "endpoint": "test",
        "tcp": False,
        "max_pending": 1000,
        "lease_s": 10.0,
        "seed": 0,
        "world_size": 1,
        "tp": 1,
        "pp": 1,
        "policy": "fcfs",
    }
    return IngressSettings(**{**values, **changes})


def echo(request: Request) -> list[int]:
    """The toy's usual answer: the prompt, and again and again, each choice from its own place."""
    prompt = request.prompt
    length = request.sampling.max_tokens or 0
    return [prompt[(request.choice + i) % len(prompt)] for i in range(length)]


class ToyEngine(threading.Thread):
    """Answers requests a token a turn, as the coordinator would. What it saw is there for the test to read."""

    def __init__(self, queue: CoordinatorQueue, answer: Answer = echo, turn_s: float = 0.001) -> None:
        super().__init__(daemon=True)
        self._queue = queue
        self._answer = answer
        self._turn_s = turn_s
        self.running = threading.Event()
        """While it is clear, requests are taken but not answered."""
        self.running.set()
        self.requests: list[Request] = []
        self.cancelled: list[int] = []
        self.drains: list[DrainMode] = []
        self.slowdowns: dict[int, float] = {}
        self.open: dict[int, tuple[Request, list[int], int]] = {}
        self.error: str | None = None
        self._to_send: list[EngineOutput] = []
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.is_set():
            try:
                busy = self.open and self.running.is_set()
                for commands in self._queue.poll(self._turn_s if busy else 0.02):
                    self._take(commands)
                for output in self._to_send:
                    self._queue.send(output)
                self._to_send.clear()
                if self.running.is_set():
                    self._turn()
            except IngressError as error:
                self.error = str(error)
                return

    def send(self, output: EngineOutput) -> None:
        """Say something to the ingress, from the test's thread."""
        self._to_send.append(output)

    def stop(self) -> None:
        self._stopped.set()
        self.join(5.0)

    def _take(self, commands: EngineCommands) -> None:
        for request in commands.requests:
            self.requests.append(request)
            self.open[request.request_id] = (request, list(self._answer(request)), 0)
        for request_id in commands.cancelled:
            self.cancelled.append(request_id)
            self.open.pop(request_id, None)
        self.slowdowns |= commands.slowdowns
        if commands.drain is not None:
            self.drains.append(commands.drain)
        if commands.wants_status:
            self._queue.send(EngineOutput(status=status(running=len(self.open))))

    def _turn(self) -> None:
        deltas = [self._next(request_id) for request_id in list(self.open)]
        if deltas:
            self._queue.send(EngineOutput(deltas=deltas))

    def _next(self, request_id: int) -> TokenDelta:
        request, answer, position = self.open[request_id]
        token_id = answer[position]
        self.open[request_id] = (request, answer, position + 1)
        reason: FinishReason | None = None
        if token_id in request.sampling.stop_token_ids:
            reason = "stop"
        elif position + 1 == len(answer):
            reason = "length"
        if reason is not None:
            del self.open[request_id]
        return TokenDelta(request_id, (token_id,), reason)


def status(**changes: Any) -> EngineStatus:
    values: dict[str, Any] = {
        "state": "ready",
        "model": "fake",
        "max_model_len": 100_000,
        "world_size": 1,
        "tp": 1,
        "pp": 1,
        "policy": "fcfs",
        "running": 0,
        "waiting": 0,
        "device_blocks": BlockUsage(10, 0),
        "host_blocks": BlockUsage(0, 0),
        "preemptions": 0,
        "uptime_s": 1.0,
    }
    return EngineStatus(**{**values, **changes})


class FrontDoor:
    """A context: the ingress process, ready, with a toy engine behind it."""

    def __init__(self, answer: Answer = echo, *, turn_s: float = 0.001, ready: bool = True, **changes: Any) -> None:
        self.process = IngressProcess(settings(**changes))
        self.endpoint: Endpoint = self.process.wait_started()
        self.engine = ToyEngine(self.process.queue, answer, turn_s)
        if ready:
            self.engine.send(EngineOutput(state="ready"))
        self.engine.start()
        if ready:
            wait_until(lambda: load(file_of(self.endpoint.name, endpoints_dir())).state == "ready")

    @property
    def address(self) -> str:
        return self.endpoint.addresses[0]

    @property
    def directory(self) -> Path:
        return Path(self.address.removeprefix("ipc://")).parent

    def close(self) -> None:
        self.engine.stop()
        self.process.close()

    def __enter__(self) -> FrontDoor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def raw(context: zmq.Context[zmq.Socket[bytes]], address: str, **options: int) -> zmq.Socket[bytes]:
    """A client without the client library."""
    socket = prepare(context.socket(zmq.DEALER), None, linger_s=0)
    for name, value in options.items():
        setattr(socket, name, value)
    socket.connect(address)
    return socket


def receive(socket: zmq.Socket[bytes], timeout_s: float = 5.0) -> ToClient:
    assert socket.poll(int(timeout_s * 1000)), "no answer"
    return protocol.decode_to_client(socket.recv_multipart())


def wait_until(holds: Callable[[], bool], within_s: float = 5.0) -> None:
    """Fail unless it holds within the time."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, "it did not come to hold"
        time.sleep(0.01)


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
