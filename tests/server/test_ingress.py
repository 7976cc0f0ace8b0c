"""The ingress process from outside: what clients ask and what they are answered."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import zmq
from front_door import EOS, VOCAB_SIZE, FrontDoor, raw, receive, wait_until

from fastserve_hpc import protocol
from fastserve_hpc.client import AsyncClient, Client
from fastserve_hpc.core.plan import TokenDelta
from fastserve_hpc.core.request import ModelLimits, Request
from fastserve_hpc.endpoint import find
from fastserve_hpc.errors import BusyError, RequestError
from fastserve_hpc.protocol import Delta, Failed, Ping, Submit, Welcome
from fastserve_hpc.server.queues import EngineOutput


def test_a_stream_is_the_whole_text_in_pieces_and_ends_with_its_usage() -> None:
    with FrontDoor() as door, Client("test") as client:
        events = list(client.stream("äbc", max_tokens=8))
        whole = client.generate("äbc", max_tokens=8)
    assert "".join(e.text for e in events) == "äbcäbc" == whole.text
    assert [e.text for e in events][:2] == ["", "ä"]
    assert [i for e in events for i in e.token_ids] == list("äbcäbc".encode()) == whole.token_ids
    assert [e.finish_reason for e in events] == [None] * 7 + ["length"]
    assert events[-1].usage == protocol.Usage(prompt_tokens=4, completion_tokens=8)
    assert len(door.engine.requests) == 2


def test_without_streaming_there_is_one_message_a_choice(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with FrontDoor() as door:
        socket = raw(context, door.address)
        params = protocol.SamplingParams(n=3, max_tokens=4)
        socket.send_multipart(protocol.encode(Submit(5, prompt="abcd", sampling=params, stream=False)))
        answers = [receive(socket) for _ in range(3)]
        assert not socket.poll(100)
    assert sorted((a.choice, a.text, a.finish_reason) for a in answers if isinstance(a, Delta)) == [
        (0, "abcd", "length"),
        (1, "bcda", "length"),
        (2, "cdab", "length"),
    ]


def test_choices_become_requests_with_one_seed_and_prompt_logprobs_once() -> None:
    with FrontDoor() as door, Client("test") as client:
        client.generate("ab", n=3, max_tokens=2, prompt_logprobs=1, stop=["never"], session="s", expected_tokens=9)
        client.generate("ab", max_tokens=2)
    first, other = door.engine.requests[:3], door.engine.requests[3]
    assert [r.choice for r in first] == [0, 1, 2]
    assert len({r.request_id for r in door.engine.requests}) == 4
    assert len({r.sampling.seed for r in first}) == 1
    assert other.sampling.seed != first[0].sampling.seed
    assert [r.sampling.prompt_logprobs for r in first] == [1, None, None]
    assert {(r.session, r.expected_tokens, r.service_class) for r in first} == {("s", 9, "interactive")}
    assert first[0].sampling.temperature == 1.0
    assert first[0].sampling.stop_token_ids == (EOS,)


def test_a_continuation_is_scored_and_nothing_is_generated() -> None:
    with FrontDoor(limits=ModelLimits(VOCAB_SIZE, 9, (EOS,))) as door, Client("test") as client:
        client.score("ab ", "cd")
        found = client.score("abcdefghi", "xy")
        for options in ({"max_tokens": 3}, {"slowdown": 0.5}):
            with pytest.raises(RequestError, match=r"nothing is generated|slowdown is 0.5: it must be at least 1"):
                client.generate("ab", continuation="cd", **options)
    first, other = door.engine.requests
    assert (bytes(first.prompt), first.sampling.prompt_logprobs_from) == (b"ab cd", 1)
    assert (first.sampling.max_tokens, first.sampling.prompt_logprobs, first.num_cut) == (1, 1, 0)
    assert (bytes(other.prompt), other.sampling.prompt_logprobs_from, other.num_cut) == (b"defghixy", 5, 3)
    assert found.num_cut == 3


def test_what_a_client_steers_is_all_that_it_has_open() -> None:
    async def steer(door: FrontDoor) -> None:
        async with AsyncClient("test") as client:
            door.engine.running.clear()
            asks = [asyncio.create_task(client.generate("ab", max_tokens=2, slowdown=2.0)) for _ in range(2)]
            while len(door.engine.open) < 2:
                await asyncio.sleep(0.01)
            await client.steer(8.0)
            while not door.engine.slowdowns:
                await asyncio.sleep(0.01)
            door.engine.running.set()
            await asyncio.gather(*asks)

    with FrontDoor() as door:
        asyncio.run(steer(door))
    assert [request.slowdown for request in door.engine.requests] == [2.0, 2.0]
    assert door.engine.slowdowns == {1: 8.0, 2: 8.0}


def test_default_seeds_are_the_same_after_a_restart() -> None:
    seeds = []
    for _ in range(2):
        with FrontDoor(seed=3) as door, Client("test") as client:
            for _ in range(2):
                client.generate("ab", max_tokens=1)
        seeds.append([r.sampling.seed for r in door.engine.requests])
    assert seeds[0] == seeds[1]


def test_a_stop_string_ends_the_request_in_the_engine_too() -> None:
    with FrontDoor() as door, Client("test") as client:
        events = list(client.stream("one, two; ", max_tokens=5000, stop="two"))
        wait_until(lambda: door.engine.cancelled == [1])
    assert "".join(e.text for e in events) == "one, "
    assert bytes(i for e in events for i in e.token_ids) == b"one, two"
    assert events[-1].finish_reason == "stop"
    assert events[-1].usage == protocol.Usage(10, 8)


def test_end_of_sequence_ends_with_stop_and_has_no_text() -> None:
    def answer(_: Request) -> list[int]:
        return [*b"hi", EOS]

    with FrontDoor(answer), Client("test") as client:
        result = client.generate("x", max_tokens=9)
    assert (result.text, result.token_ids, result.finish_reason) == ("hi", [*b"hi", EOS], "stop")


@pytest.mark.parametrize(
    ("submit", "code", "text"),
    [
        (Submit(1), "invalid_request", "exactly one of prompt and messages"),
        (Submit(1, prompt="x", messages=[]), "invalid_request", "exactly one"),
        (Submit(1, prompt="x", model="other"), "model_not_found", "'other' is not served here, 'fake' is"),
        (Submit(1, prompt=""), "invalid_request", "empty"),
        (Submit(1, prompt=[2**62]), "invalid_request", "0 to 258"),
        (Submit(1, prompt="x" * 100_000), "context_length_exceeded", "100000 tokens"),
        (Submit(1, prompt="x" * 1_000_000), "context_length_exceeded", "1000000 characters"),
        (Submit(1, prompt="x", expected_tokens=0), "invalid_request", "expected_tokens is 0"),
        (Submit(1, prompt="x", session="s" * 300), "invalid_request", "session"),
        (Submit(1, prompt="x", sampling=protocol.SamplingParams(stop=("s" * 2000,))), "invalid_request", "2000 charac"),
        (Submit(1, prompt="x", sampling=protocol.SamplingParams(n=0)), "invalid_request", "n is 0"),
        (Submit(1, prompt="x", sampling=protocol.SamplingParams(n=2**60)), "invalid_request", "n is"),
        (
            Submit(1, prompt="x", sampling=protocol.SamplingParams(top_p=float("nan"))),
            "invalid_request",
            "top_p is nan",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals_have_a_code_and_name_the_value(
    context: zmq.Context[zmq.Socket[bytes]], shared_door: FrontDoor, submit: Submit, code: str, text: str
) -> None:
    socket = raw(context, shared_door.address)
    socket.send_multipart(protocol.encode(submit))
    answer = receive(socket)
    assert isinstance(answer, Failed)
    assert (answer.id, answer.code) == (1, code)
    assert text in answer.message


@pytest.fixture(scope="module")
def shared_door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontDoor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTSERVE_HPC_HOME", str(tmp_path_factory.mktemp("home")))
        door = FrontDoor()
    yield door
    door.close()


def test_wrong_types_are_answered_under_the_message_s_id(
    context: zmq.Context[zmq.Socket[bytes]], shared_door: FrontDoor
) -> None:
    socket = raw(context, shared_door.address)
    message = {"type": "submit", "id": 7, "prompt": "x", "sampling": {"temperature": "hot"}}
    socket.send_multipart([protocol.MAGIC, protocol._encoder.encode(message)])
    answer = receive(socket)
    assert isinstance(answer, Failed)
    assert (answer.id, answer.code) == (7, "invalid_request")
    assert "$.sampling.temperature" in answer.message


def test_an_id_in_use_is_refused_and_free_again_after_the_end(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with FrontDoor() as door:
        door.engine.running.clear()
        socket = raw(context, door.address)
        submit = Submit(1, prompt="x", sampling=protocol.SamplingParams(max_tokens=1))
        for _ in range(2):
            socket.send_multipart(protocol.encode(submit))
        answer = receive(socket)
        assert isinstance(answer, Failed)
        assert "id 1 is still in use" in answer.message
        door.engine.running.set()
        assert isinstance(receive(socket), Delta)
        socket.send_multipart(protocol.encode(submit))
        assert isinstance(receive(socket), Delta)
        assert len(door.engine.requests) == 2


def test_a_full_server_says_busy_with_the_numbers_and_takes_more_when_there_is_room() -> None:
    with FrontDoor(max_pending=3) as door, Client("test") as client:
        door.engine.running.clear()
        open_streams = [client.stream("x", max_tokens=2) for _ in range(2)]
        with pytest.raises(BusyError, match=r"2 requests are open and 2 more .* limit of 3.*--max-pending"):
            client.generate("x", n=2, max_tokens=2)
        door.engine.running.set()
        for stream in open_streams:
            assert [e.text for e in stream] == ["x", "x"]
        assert len(client.generate("x", n=3, max_tokens=2).choices) == 3


def test_a_cancel_reaches_the_engine_and_nothing_more_is_sent(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with FrontDoor(turn_s=0.02) as door:
        socket = raw(context, door.address)
        params = protocol.SamplingParams(max_tokens=1000, n=2)
        socket.send_multipart(protocol.encode(Submit(1, prompt="x", sampling=params)))
        receive(socket)
        socket.send_multipart(protocol.encode(protocol.Cancel(1)))
        socket.send_multipart(protocol.encode(Ping(2)))
        while not isinstance(receive(socket), Welcome):
            pass
        assert not socket.poll(150)
        assert sorted(door.engine.cancelled) == [1, 2]
        assert not door.engine.open


def test_a_drain_is_taken_once_and_refuses_new_requests() -> None:
    with FrontDoor() as door, Client("test") as client:
        door.engine.running.clear()
        running = client.stream("ab", max_tokens=2)
        client.drain()
        wait_until(lambda: door.engine.drains == ["finish"])
        assert find("test").state == "draining"
        with pytest.raises(RequestError, match="draining") as refused:
            client.generate("x")
        assert refused.value.code == "draining"
        client.drain(now=True)
        wait_until(lambda: door.engine.drains == ["finish", "now"])
        door.engine.running.set()
        assert "".join(e.text for e in running) == "ab"


def test_an_engine_error_fails_the_request_with_its_words() -> None:
    with FrontDoor() as door, Client("test") as client:
        door.engine.running.clear()
        running = client.stream("ab", max_tokens=2)
        wait_until(lambda: len(door.engine.open) == 1)
        door.engine.send(EngineOutput(deltas=[TokenDelta(1, finish_reason="error", error="the blocks are on fire")]))
        with pytest.raises(RequestError, match="on fire"):
            next(running)
