"""Open requests: every one ends exactly once, and nothing is kept of it."""

from __future__ import annotations

import random

import pytest

from fastserve_hpc.core.plan import TokenDelta, TokenLogprobs
from fastserve_hpc.core.request import Request, SamplingParams
from fastserve_hpc.errors import RequestError
from fastserve_hpc.models.tokenizer import ByteTokenizer
from fastserve_hpc.protocol import Delta, Failed, Submit, Usage
from fastserve_hpc.server.doors import Peer
from fastserve_hpc.server.sessions import Sessions

A, B = Peer(0, b"a"), Peer(1, b"a")


def open_one(
    sessions: Sessions, peer: Peer, id: int, first: int, n: int = 1, stream: bool = True, **sampling: object
) -> None:
    params = SamplingParams(n=n, **sampling)  # type: ignore[arg-type]
    requests = [Request(first + i, (1, 2), params, i) for i in range(n)]
    sessions.open(peer, Submit(id, prompt="x", sampling=params, stream=stream), requests)


def letters(request_id: int, text: str, **more: object) -> TokenDelta:
    return TokenDelta(request_id, tuple(text.encode()), **more)  # type: ignore[arg-type]


@pytest.fixture
def sessions() -> Sessions:
    return Sessions(ByteTokenizer())


def test_tokens_become_the_deltas_of_their_client(sessions: Sessions) -> None:
    open_one(sessions, A, 5, 1)
    open_one(sessions, B, 5, 2)
    first = sessions.take(letters(2, "hi"))
    last = sessions.take(letters(2, "!", finish_reason="length"))
    assert first is not None
    assert last is not None
    assert (first.peer, first.message) == (B, Delta(5, 0, "hi", [*b"hi"]))
    assert last.message == Delta(5, 0, "!", [*b"!"], "length", usage=Usage(2, 3))
    assert last.cancelled == []
    assert sessions.peers == [A]
    assert sessions.take(letters(2, "late")) is None


def test_tokens_and_logprobs_after_a_stop_string_are_cut_and_the_engine_is_told(sessions: Sessions) -> None:
    open_one(sessions, A, 5, 1, stop=("st",), min_tokens=1)
    logprobs = tuple(TokenLogprobs(i, -1.0) for i in range(6))
    outcome = sessions.take(letters(1, "a st!!", logprobs=logprobs))
    assert outcome is not None
    assert outcome.message == Delta(5, 0, "a ", [*b"a st"], "stop", logprobs=list(logprobs[:4]), usage=Usage(2, 4))
    assert outcome.cancelled == [1]
    assert len(sessions) == 0


def test_a_stop_string_with_the_last_token_needs_no_cancel(sessions: Sessions) -> None:
    open_one(sessions, A, 5, 1, stop=("t",))
    outcome = sessions.take(letters(1, "st", finish_reason="length"))
    assert outcome is not None
    assert isinstance(outcome.message, Delta)
    assert (outcome.message.text, outcome.message.finish_reason, outcome.cancelled) == ("s", "stop", [])


def test_held_text_comes_with_the_end(sessions: Sessions) -> None:
    open_one(sessions, A, 5, 1, stop=("stop",))
    texts = []
    for tokens in (letters(1, "a st"), letters(1, "o", finish_reason="length")):
        outcome = sessions.take(tokens)
        assert outcome is not None
        assert isinstance(outcome.message, Delta)
        texts.append(outcome.message.text)
    assert texts == ["a ", "sto"]


def test_an_error_of_one_choice_ends_its_submission(sessions: Sessions) -> None:
    open_one(sessions, A, 5, 1, n=3)
    sessions.take(letters(1, "x", finish_reason="length"))
    outcome = sessions.take(TokenDelta(2, finish_reason="error", error="broken"))
    assert outcome is not None
    assert outcome.message == Failed(5, "internal", "broken")
    assert outcome.cancelled == [3]
    assert (len(sessions), sessions.peers) == (0, [])


def test_ids_are_in_use_until_the_last_choice_ends(sessions: Sessions) -> None:
    open_one(sessions, A, 5, 1, n=2)
    sessions.check_new(B, 5)
    sessions.take(letters(1, "x", finish_reason="length"))
    with pytest.raises(RequestError, match="id 5 is still in use"):
        sessions.check_new(A, 5)
    sessions.take(letters(2, "x", finish_reason="length"))
    sessions.check_new(A, 5)


def test_whatever_happens_in_whatever_order_nothing_stays(sessions: Sessions) -> None:
    rng = random.Random(0)
    peers = [Peer(0, bytes([i])) for i in range(4)]
    alive: set[int] = set()  # requests in the engine
    ended: list[tuple[Peer, int, int]] = []
    next_request, next_id = 1, 1
    for _ in range(5000):
        action = rng.choice(["open", "token", "token", "end", "error", "cancel", "drop"])
        peer = rng.choice(peers)
        if action == "open":
            n = rng.randrange(1, 4)
            open_one(sessions, peer, next_id, next_request, n, rng.random() < 0.5, stop=("ab",))
            alive |= set(range(next_request, next_request + n))
            next_request, next_id = next_request + n, next_id + 1
        elif action == "cancel":
            alive -= set(sessions.cancel(peer, rng.randrange(1, next_id + 1)))
        elif action == "drop" and rng.random() < 0.1:
            alive -= set(sessions.drop(peer))
        elif alive and action in ("token", "end", "error"):
            request_id = rng.choice(sorted(alive))
            reason = {"token": None, "end": "length", "error": "error"}[action]
            outcome = sessions.take(letters(request_id, rng.choice("abc"), finish_reason=reason))
            assert outcome is not None
            if reason is not None:
                alive.discard(request_id)
            alive -= set(outcome.cancelled)
            if isinstance(outcome.message, Delta) and outcome.message.finish_reason is not None:
                ended.append((outcome.peer, outcome.message.id, outcome.message.choice))
        assert len(sessions) == len(alive)
    assert len(ended) == len(set(ended)) > 100
    for outcome in sessions.fail_all("ended", "over"):
        alive -= set(outcome.cancelled)
    assert (alive, len(sessions), sessions.peers) == (set(), 0, [])
