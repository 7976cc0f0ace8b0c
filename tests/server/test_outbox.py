"""Merging for clients that do not read, forgetting those that are gone."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from fastserve_hpc import protocol
from fastserve_hpc.core.plan import TokenLogprobs
from fastserve_hpc.protocol import Alive, Delta, Failed, ToClient, Usage
from fastserve_hpc.server.doors import Blocked, Peer, Unreachable
from fastserve_hpc.server.outbox import MAX_REPLIES, Outbox

A, B = Peer(0, b"a"), Peer(0, b"b")


@dataclass
class Wire:
    """Sockets whose peers read, do not read, or are gone; and a clock."""

    sent: list[tuple[Peer, ToClient]] = field(default_factory=list)
    blocked: set[Peer] = field(default_factory=set)
    gone: set[Peer] = field(default_factory=set)
    room: int = 10**9
    now: float = 0.0

    def send(self, peer: Peer, frames: list[bytes]) -> None:
        if peer in self.gone:
            raise Unreachable
        if peer in self.blocked or self.room == 0:
            raise Blocked
        self.room -= 1
        self.sent.append((peer, protocol.decode_to_client(frames)))

    def messages(self, peer: Peer) -> list[ToClient]:
        return [message for to, message in self.sent if to == peer]


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def outbox(wire: Wire) -> Outbox:
    return Outbox(wire.send, clock=lambda: wire.now)


def delta(text: str, choice: int = 0, id: int = 1, **more: object) -> Delta:
    return Delta(id, choice, text, [ord(c) for c in text], **more)  # type: ignore[arg-type]


def test_who_reads_gets_every_message_at_once(wire: Wire, outbox: Outbox) -> None:
    messages = [delta("a"), delta("b"), Failed(2, "busy", "later")]
    for message in messages:
        outbox.post(A, message)
    assert wire.messages(A) == messages
    assert outbox.retry_at() is None
    assert outbox.take_sent_to() == {A}
    assert outbox.take_sent_to() == set()


def test_who_does_not_gets_one_delta_a_choice_when_it_reads_again(wire: Wire, outbox: Outbox) -> None:
    wire.blocked.add(A)
    logprob = TokenLogprobs(1, -0.5)
    outbox.post(A, delta("a", prompt_logprobs=[None], logprobs=[logprob]))
    outbox.post(A, delta("x", choice=1))
    outbox.post(A, Failed(9, "busy", "later"))
    outbox.post(A, delta("b", logprobs=[logprob], finish_reason="stop", usage=Usage(1, 2)))
    outbox.post(B, delta("z"))
    assert wire.messages(B) == [delta("z")]
    wire.blocked.clear()
    outbox.retry()
    assert wire.messages(A) == []  # not yet time
    wire.now = outbox.retry_at() or 0.0
    outbox.retry()
    merged = delta("ab", prompt_logprobs=[None], logprobs=[logprob, logprob], finish_reason="stop", usage=Usage(1, 2))
    assert wire.messages(A) == [merged, delta("x", choice=1), Failed(9, "busy", "later")]
    assert outbox.retry_at() is None


def test_nothing_is_lost_or_reordered_when_there_is_room_for_one_at_a_time(wire: Wire, outbox: Outbox) -> None:
    for i in range(200):
        wire.room = int(i % 7 == 0)
        wire.now += 1.0
        outbox.retry()
        outbox.post(A, delta(chr(97 + i % 26)))
    wire.room, wire.now = 10, wire.now + 1.0
    outbox.retry()
    text = "".join(m.text for m in wire.messages(A) if isinstance(m, Delta))
    assert text == "".join(chr(97 + i % 26) for i in range(200))
    assert len(wire.messages(A)) < 40


def test_retries_come_less_often_the_longer_it_does_not_read(wire: Wire, outbox: Outbox) -> None:
    wire.blocked.add(A)
    outbox.post(A, delta("a"))
    pauses = []
    for _ in range(10):
        wire.now = outbox.retry_at() or 0.0
        outbox.retry()
        pauses.append((outbox.retry_at() or 0.0) - wire.now)
    assert pauses == sorted(pauses)
    assert pauses[0] < 0.05
    assert pauses[-1] <= 0.5


def test_replies_to_who_never_reads_are_bounded(wire: Wire, outbox: Outbox) -> None:
    wire.blocked.add(A)
    for i in range(3 * MAX_REPLIES):
        outbox.post(A, Failed(i, "protocol", "what?"))
    wire.blocked.clear()
    wire.now = 10.0
    outbox.retry()
    assert len(wire.messages(A)) == MAX_REPLIES


def test_a_refusal_is_not_lost_behind_many_answers(wire: Wire, outbox: Outbox) -> None:
    wire.blocked.add(A)
    for i in range(2 * MAX_REPLIES):
        outbox.post(A, delta("a", id=i))
    outbox.post(A, Failed(-2, "busy", "later"))
    wire.blocked.clear()
    wire.now = 10.0
    outbox.retry()
    assert wire.messages(A)[-1] == Failed(-2, "busy", "later")
    wire.blocked.add(A)
    for i in range(MAX_REPLIES):  # what went out counts no more
        outbox.post(A, Failed(i, "busy", "later"))
    wire.blocked.clear()
    wire.now = 20.0
    outbox.retry()
    assert len(wire.messages(A)) == 3 * MAX_REPLIES + 1


def test_who_is_gone_is_reported_once_and_forgotten(wire: Wire, outbox: Outbox) -> None:
    wire.blocked.add(A)
    outbox.post(A, delta("a"))
    wire.gone.update({A, B})
    outbox.post(B, delta("b"))
    assert outbox.take_gone() == [B]
    wire.now = 10.0
    outbox.retry()
    assert outbox.take_gone() == [A]
    assert outbox.take_gone() == []
    assert outbox.retry_at() is None
    assert wire.sent == []


def test_a_cancelled_request_s_deltas_are_dropped(wire: Wire, outbox: Outbox) -> None:
    wire.blocked.add(A)
    outbox.post(A, delta("a", id=1))
    outbox.post(A, delta("b", id=2))
    outbox.forget(A, 1)
    outbox.forget(B, 1)
    wire.blocked.clear()
    wire.now = 10.0
    outbox.retry()
    assert wire.messages(A) == [delta("b", id=2)]


def test_a_probe_is_a_sign_of_life_but_never_one_more_message_in_a_backlog(wire: Wire, outbox: Outbox) -> None:
    outbox.probe(A)
    assert wire.messages(A) == [Alive()]
    wire.blocked.add(A)
    outbox.post(A, delta("a"))
    for _ in range(10):
        outbox.probe(A)
    wire.blocked.clear()
    wire.now = 10.0
    outbox.retry()
    assert wire.messages(A) == [Alive(), delta("a")]
    wire.gone.add(A)
    outbox.probe(A)
    assert outbox.take_gone() == [A]
