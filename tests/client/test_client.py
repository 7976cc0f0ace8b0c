"""The synchronous client against a real ingress with a toy engine."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zmq
from front_door import EOS, FrontDoor, status, wait_until

from fastserve_hpc import protocol
from fastserve_hpc.client import Client
from fastserve_hpc.client.connection import connect
from fastserve_hpc.core.plan import TokenDelta, TokenLogprobs
from fastserve_hpc.core.request import Request
from fastserve_hpc.dealer import prepare
from fastserve_hpc.endpoint import Endpoint, ServerProcess
from fastserve_hpc.errors import EndpointError, RequestError
from fastserve_hpc.server.queues import EngineOutput


@pytest.fixture
def door(home: Path) -> Iterator[FrontDoor]:
    with FrontDoor() as door:
        yield door


def test_text_ids_and_messages_are_prompts(door: FrontDoor) -> None:
    with Client("test") as client:
        client.generate("hé", max_tokens=1)
        client.generate([5, 6], max_tokens=1)
        client.generate(range(3), max_tokens=1)
        client.generate([{"role": "user", "content": "hi"}], max_tokens=1)
    prompts = [r.prompt for r in door.engine.requests]
    assert prompts == [tuple("hé".encode()), (5, 6), (0, 1, 2), tuple(b"user: hi\nassistant: ")]


def test_a_generation_has_all_choices_and_adds_up_their_usage(door: FrontDoor) -> None:
    with Client("test") as client:
        result = client.generate("abc", n=2, max_tokens=4)
    assert [(c.index, c.text, c.finish_reason) for c in result.choices] == [
        (0, "abca", "length"),
        (1, "bcab", "length"),
    ]
    assert (result.text, result.token_ids, result.finish_reason) == ("abca", list(b"abca"), "length")
    assert result.usage == protocol.Usage(3, 8)


def test_logprobs_come_through(door: FrontDoor) -> None:
    door.engine.running.clear()
    entry = TokenLogprobs(97, -0.25, ((97, -0.25), (98, -2.0)))
    with Client("test") as client:
        stream = client.stream("ab", max_tokens=2, logprobs=2, prompt_logprobs=1)
        wait_until(lambda: len(door.engine.open) == 1)
        door.engine.send(EngineOutput(deltas=[TokenDelta(1, prompt_logprobs=(None, entry))]))
        door.engine.send(EngineOutput(deltas=[TokenDelta(1, (97,), "length", logprobs=(entry,))]))
        events = list(stream)
    assert [e.prompt_logprobs for e in events] == [[None, entry], []]
    assert [e.logprobs for e in events] == [[], [entry]]


def test_streams_side_by_side_each_get_their_own(door: FrontDoor) -> None:
    with Client("test") as client:
        streams = [client.stream(word, max_tokens=30) for word in ("abc", "xyz", "123")]
        texts = ["", "", ""]
        for _ in range(30):
            for i, stream in enumerate(streams):
                texts[i] += next(stream).text
        assert [list(s) for s in streams] == [[], [], []]
    assert texts == ["abc" * 10, "xyz" * 10, "123" * 10]


def test_closing_breaking_and_dropping_a_stream_cancel_it(door: FrontDoor) -> None:
    with Client("test") as client:
        first = client.stream("a", max_tokens=90_000)
        next(first)
        first.close()
        first.close()
        assert list(first) == []
        for event in client.stream("b", max_tokens=90_000):
            assert event.text == "b"
            break
        dropped = client.stream("c", max_tokens=90_000)
        del dropped
        gc.collect()
        wait_until(lambda: sorted(door.engine.cancelled) == [1, 2, 3])
        assert client.status().running == 0
        assert client._calls.open_ids == []


def test_a_stream_dropped_in_another_thread_is_cancelled_by_the_client_s_own(door: FrontDoor) -> None:
    with Client("test") as client:
        streams = [client.stream("c", max_tokens=90_000)]
        thread = threading.Thread(target=streams.clear)
        thread.start()
        thread.join()
        assert client.status().state == "ready"
        wait_until(lambda: door.engine.cancelled == [1])


def test_closing_the_client_cancels_what_runs(door: FrontDoor) -> None:
    client = Client("test")
    stream = client.stream("a", max_tokens=90_000)
    next(stream)
    client.close()
    client.close()
    with pytest.raises(EndpointError, match="closed"):
        list(stream)
    wait_until(lambda: door.engine.cancelled == [1])
    assert client.generate("ab", max_tokens=2).text == "ab"  # connects anew
    client.close()


def test_refused_values_raise_here_or_there_and_cost_nothing_else(door: FrontDoor) -> None:
    with Client("test") as client:
        for prompt, text in (
            ([1, "x"], r"prompt\[1\] is 'x': token ids are integers"),
            ([1, 2.5], r"prompt\[1\] is 2.5"),
            ([2**70], r"prompt\[0\] is 1180591620717411303424"),
            ([-1], r"prompt\[0\] is -1: token ids go from 0 to 258"),
            ([{"role": "user"}], r"messages\[0\] is .* must have 'role' and 'content'"),
            ([{"role": "user", "content": 5}], r"messages\[0\] is .* must be text"),
            ("", "empty"),
            ([], "empty"),
            ("\ud800", "not Unicode and cannot be sent"),
            (None, "the prompt is None: it must be text"),
            (5, "the prompt is 5: it must be text"),
            ("x" * (17 * 2**20), r"the request has 178\d+ bytes"),
        ):
            with pytest.raises(RequestError, match=text):
                client.generate(prompt, max_tokens=1)
        with pytest.raises(RequestError, match="n is 0"):
            client.generate("x", n=0)
        with pytest.raises(RequestError, match="n is 4611686018427387904"):
            client.generate("x", n=2**62)  # nothing is made for so many
        with pytest.raises(RequestError, match="temperature"):
            client.generate("x", temperature="hot")
        with pytest.raises(RequestError, match="stop"):
            client.generate("x", stop=5)
        with pytest.raises(TypeError, match="^max_token is no parameter of a request: did you mean max_tokens"):
            client.generate("x", max_token=5)
        assert client.generate("ab", max_tokens=2).text == "ab"
        assert client._calls.open_ids == []


def test_status_and_stop_ids(door: FrontDoor) -> None:
    with Client("test") as client:
        now = client.status()
        assert replace(now, details={}) == status()
        assert now.details["open_requests"] == 0
        client.generate("a", max_tokens=1, stop_token_ids=[3], stop="s")
    assert door.engine.requests[0].sampling.stop_token_ids == (3, EOS)
    assert door.engine.requests[0].sampling.stop == ("s",)


def test_a_server_that_is_killed_ends_the_wait_at_once(door: FrontDoor) -> None:
    door.engine.running.clear()
    with Client("test") as client:
        stream = client.stream("a", max_tokens=2)
        timer = threading.Timer(0.2, os.kill, (door.process.pid, signal.SIGKILL))
        timer.start()
        started = time.monotonic()
        with pytest.raises(EndpointError, match="was lost"):
            next(stream)
        assert time.monotonic() - started < 3.0


def test_a_server_that_is_stopped_ends_the_wait_in_bounded_time(door: FrontDoor) -> None:
    door.engine.running.clear()
    with Client("test", silence_s=1.5) as client:
        stream = client.stream("a", max_tokens=2)
        wait_until(lambda: len(door.engine.open) == 1)
        os.kill(door.process.pid, signal.SIGSTOP)
        started = time.monotonic()
        try:
            with pytest.raises(EndpointError, match="silent for 2 s"):
                next(stream)
            assert time.monotonic() - started < 5.0
        finally:
            os.kill(door.process.pid, signal.SIGCONT)


def test_a_slow_server_that_shows_signs_of_life_is_waited_for(door: FrontDoor) -> None:
    door.engine.running.clear()
    with Client("test", silence_s=1.5) as client:
        stream = client.stream("ab", max_tokens=2)
        timer = threading.Timer(3.5, door.engine.running.set)
        timer.start()
        assert "".join(e.text for e in stream) == "ab"


def test_a_slow_user_of_a_stream_loses_nothing(home: Path) -> None:
    """He reads nothing for much longer than the lease, while many more messages come than queues usually hold."""
    num_tokens = 8000
    with FrontDoor(lease_s=1.0, turn_s=0.0) as door, Client("test", silence_s=0.5) as client:
        stream = client.stream("ab", max_tokens=num_tokens)
        first = next(stream)
        time.sleep(4.0)
        events = [first, *stream]
        assert sum(len(e.token_ids) for e in events) == num_tokens
        assert "".join(e.text for e in events) == "ab" * (num_tokens // 2)
        assert door.engine.cancelled == []


def test_ctrl_c_cancels_and_leaves_the_client_usable(door: FrontDoor) -> None:
    door.engine.running.clear()
    with Client("test") as client:
        for _ in range(3):
            timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                client.generate("a", max_tokens=2)
        wait_until(lambda: sorted(door.engine.cancelled) == [1, 2, 3])
        door.engine.running.set()
        assert client.generate("ab", max_tokens=2).text == "ab"


def test_after_a_restart_the_next_call_connects_anew(home: Path) -> None:
    with FrontDoor():
        client = Client("test")
        assert client.generate("ab", max_tokens=2).text == "ab"
    with pytest.raises(EndpointError):
        client.generate("ab", max_tokens=2)
    with FrontDoor() as door:
        assert client.generate("cd", max_tokens=2).text == "cd"
        assert client.endpoint.instance_id == door.endpoint.instance_id
    client.close()


def test_nobody_there_other_server_other_version(door: FrontDoor, tmp_path: Path) -> None:
    with pytest.raises(EndpointError, match="no endpoint named 'nobody'"):
        Client("nobody")
    other = msgspec.structs.replace(door.endpoint, instance_id="other")
    path = tmp_path / "other.json"
    path.write_bytes(msgspec.json.encode(other))
    with pytest.raises(EndpointError, match="another server answers"):
        Client(path)
    path.write_bytes(msgspec.json.encode(Endpoint("gone", [f"ipc://{tmp_path}/gone"])))
    with pytest.raises(EndpointError, match="is gone: it has ended"):
        Client(path)
    far = msgspec.structs.replace(door.endpoint.process, host="elsewhere")
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(door.endpoint, process=far)))
    with pytest.raises(EndpointError, match="on host elsewhere alone: .* --tcp"):
        Client(path)


def test_a_server_of_another_version_says_so() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        port = server.bind_to_random_port("tcp://127.0.0.1")
        endpoint = Endpoint("x", [f"tcp://127.0.0.1:{port}"])

        def answer() -> None:
            identity, *_ = server.recv_multipart()
            server.send_multipart([identity, protocol.MAGIC[:-1] + b"\x07", b"whatever"])

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(EndpointError, match="protocol version 7"):
            connect(endpoint, 5.0)
        thread.join()


def test_tcp_is_used_where_the_socket_file_cannot_be_and_a_wrong_key_is_named(home: Path, tmp_path: Path) -> None:
    with FrontDoor(tcp=True) as door:
        tcp = [a for a in door.endpoint.addresses if a.startswith("tcp://")]
        path = tmp_path / "far.json"
        far = msgspec.structs.replace(door.endpoint, addresses=["tcp://127.0.0.1:1", *tcp])
        path.write_bytes(msgspec.json.encode(far))
        with Client(path) as client:
            assert client.generate("ab", max_tokens=2).text == "ab"
        public, secret = (key.decode() for key in zmq.curve_keypair())
        assert far.keys is not None
        wrong = msgspec.structs.replace(far.keys, client_public=public, client_secret=secret)
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(far, keys=wrong, addresses=tcp)))
        started = time.monotonic()
        with pytest.raises(EndpointError, match="refuses this key"):
            Client(path)
        assert time.monotonic() - started < 5.0


def test_who_does_not_answer_is_given_up_after_the_connect_timeout() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        port = server.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(EndpointError, match="nobody answers at tcp://.* within 0.3 s"):
            connect(Endpoint("x", [f"tcp://127.0.0.1:{port}"]), 0.3)


def test_a_server_that_ends_before_it_answers_is_not_waited_for(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/clients"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.bind(address)
        gone = threading.Timer(0.3, (tmp_path / "clients").unlink)
        gone.start()
        with pytest.raises(EndpointError, match="server of endpoint 'x' has ended"):
            connect(Endpoint("x", [address]), timeout_s=60.0)
    with subprocess.Popen(["sleep", "60"]) as child:
        endpoint = Endpoint("x", [address], process=ServerProcess.of(child.pid))
        (tmp_path / "clients").touch()
        killed = threading.Timer(0.3, child.kill)
        killed.start()
        with pytest.raises(EndpointError, match="has ended"):
            connect(endpoint, timeout_s=60.0)


def test_an_answer_of_the_wrong_kind_is_an_endpoint_error(door: FrontDoor) -> None:
    with Client("test") as client:
        stream = client.stream("ab", max_tokens=2)
        list(stream)
        call = client._calls.open()
        client._calls.sort_in(protocol.encode(protocol.Draining(call.id)))
        with pytest.raises(EndpointError, match="Draining instead of Delta"):
            stream._state.take(client._next(call))
        with pytest.raises(EndpointError, match="no message"):
            client._calls.sort_in([b"garbage"])


def test_importing_the_client_is_quick_and_light() -> None:
    code = (
        "import sys, time; t = time.process_time(); import fastserve_hpc.client; print(time.process_time() - t)\n"
        "heavy = {'torch', 'mpi4py', 'numpy', 'tokenizers', 'jinja2', 'asyncio', 'fastserve_hpc.server'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        "from fastserve_hpc.client import AsyncClient, Client"
    )
    outputs = [
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split("\n")
        for _ in range(3)
    ]
    assert all(lines[1] == "[]" for lines in outputs), outputs
    assert min(float(lines[0]) for lines in outputs) < 0.3


def test_a_request_may_be_sent_by_hand(door: FrontDoor) -> None:
    """The wire as docs describe it: a DEALER, two frames."""
    with zmq.Context() as context, prepare(context.socket(zmq.DEALER), None, linger_s=0) as socket:
        socket.connect(door.address)
        submit = {"type": "submit", "id": 1, "prompt": "ab", "sampling": {"max_tokens": 2}, "stream": False}
        socket.send_multipart([b"FSHPC\x01", msgspec.msgpack.encode(submit)])
        magic, payload = socket.recv_multipart()
    assert magic == b"FSHPC\x01"
    delta = msgspec.msgpack.decode(payload)
    assert (delta["type"], delta["id"], delta["text"], delta["finish_reason"]) == ("delta", 1, "ab", "length")


def test_requests_have_their_service_class(door: FrontDoor) -> None:
    with Client("test") as client:
        client.generate("ab", max_tokens=1, service_class="batch", model="fake")
        with pytest.raises(RequestError, match="not served here") as refused:
            client.generate("ab", max_tokens=1, model="gpt")
    requests: list[Request] = door.engine.requests
    assert requests[0].service_class == "batch"
    assert refused.value.code == "model_not_found"
