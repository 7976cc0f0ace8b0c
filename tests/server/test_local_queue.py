"""The socket pair between coordinator and ingress."""

from __future__ import annotations

import threading
import time

import pytest

from fastserve_hpc.core.plan import TokenDelta
from fastserve_hpc.core.request import Request, SamplingParams
from fastserve_hpc.server import local_queue
from fastserve_hpc.server.local_queue import CoordinatorQueue, IngressError, IngressQueue, QueueClosed, queue_pair
from fastserve_hpc.server.queues import EngineCommands, EngineOutput


@pytest.fixture
def ends() -> tuple[CoordinatorQueue, IngressQueue]:
    return queue_pair()


def test_round_trip_keeps_order_and_types(ends: tuple[CoordinatorQueue, IngressQueue]) -> None:
    coordinator, ingress = ends
    request = Request(7, (1, 2, 3), SamplingParams(max_tokens=4, stop=("x",), logit_bias={5: 1.5}), session="s")
    ingress.send(EngineCommands(requests=[request]))
    ingress.send(EngineCommands(cancelled=[7], wants_status=True, drain="now"))
    assert coordinator.poll(1.0) == [
        EngineCommands(requests=[request]),
        EngineCommands(cancelled=[7], wants_status=True, drain="now"),
    ]
    coordinator.send(EngineOutput(deltas=[TokenDelta(7, (1, 2), "length")], state="ready"))
    assert ingress.receive() == [EngineOutput(deltas=[TokenDelta(7, (1, 2), "length")], state="ready")]


def test_poll_without_timeout_returns_at_once_and_with_one_waits_for_the_first(
    ends: tuple[CoordinatorQueue, IngressQueue],
) -> None:
    coordinator, ingress = ends
    assert coordinator.poll() == []
    started = time.monotonic()
    assert coordinator.poll(0.05) == []
    assert time.monotonic() - started >= 0.045
    timer = threading.Timer(0.05, ingress.send, [EngineCommands(cancelled=[1])])
    timer.start()
    assert coordinator.poll(5.0) == [EngineCommands(cancelled=[1])]
    assert time.monotonic() - started < 2.0


def test_a_message_larger_than_the_kernel_buffer_arrives(ends: tuple[CoordinatorQueue, IngressQueue]) -> None:
    coordinator, ingress = ends
    request = Request(1, tuple(range(500_000)), SamplingParams(max_tokens=1))
    ingress.send(EngineCommands(requests=[request]))
    assert ingress.backlog_bytes > 0
    received: list[EngineCommands] = []
    for _ in range(100):
        received += coordinator.poll()
        ingress.flush()
    assert received == [EngineCommands(requests=[request])]
    assert ingress.backlog_bytes == 0


def test_send_never_waits_for_an_ingress_that_does_not_read(
    ends: tuple[CoordinatorQueue, IngressQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, _ingress = ends
    monkeypatch.setattr(local_queue, "MAX_BACKLOG_BYTES", 1 << 20)
    started = time.monotonic()
    with pytest.raises(IngressError, match="hangs"):
        _send_many(coordinator)
    assert time.monotonic() - started < 5.0


def _send_many(coordinator: CoordinatorQueue) -> None:
    output = EngineOutput(deltas=[TokenDelta(1, tuple(range(10_000)))])
    for _ in range(1000):
        coordinator.send(output)


def test_a_dead_ingress_is_an_error_that_says_so(ends: tuple[CoordinatorQueue, IngressQueue]) -> None:
    coordinator, ingress = ends
    ingress.close()
    with pytest.raises(IngressError, match="has ended"):
        coordinator.poll(1.0)
    with pytest.raises(IngressError, match="has ended"):
        coordinator.send(EngineOutput(state="ended"))


def test_the_last_output_is_read_before_the_end_is_seen(ends: tuple[CoordinatorQueue, IngressQueue]) -> None:
    coordinator, ingress = ends
    coordinator.send(EngineOutput(state="ended"))
    coordinator.close()
    assert ingress.receive() == [EngineOutput(state="ended")]
    with pytest.raises(QueueClosed):
        ingress.receive()
