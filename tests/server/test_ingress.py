"""The ingress process from outside: clients on its sockets, a toy engine at its queue."""

from __future__ import annotations

import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from front_door import EOS, FrontDoor, rss_bytes, settings, status, wait_until

from fastserve_hpc import protocol
from fastserve_hpc.client import Client
from fastserve_hpc.core.plan import TokenDelta
from fastserve_hpc.core.request import Request
from fastserve_hpc.dealer import prepare
from fastserve_hpc.endpoint import Endpoint, endpoints_dir, find
from fastserve_hpc.errors import BusyError, ConfigError, EndpointError, ModelError, RequestError
from fastserve_hpc.protocol import Delta, Failed, Ping, Submit, ToClient, Welcome
from fastserve_hpc.server.ingress_process import IngressProcess
from fastserve_hpc.server.queues import EngineOutput


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


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


def test_two_hundred_cut_clients_leave_nothing(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    rng = random.Random(0)
    with FrontDoor() as door:
        door.engine.running.clear()  # nothing is sent, so only the probe can find out
        for i in range(200):
            socket = raw(context, door.address)
            params = protocol.SamplingParams(max_tokens=50_000)
            socket.send_multipart(protocol.encode(Submit(1, prompt="x", sampling=params, stream=i % 2 == 0)))
            time.sleep(rng.choice([0, 0, 0.002]))
            socket.close(linger=rng.choice([0, 100]))
        with Client("test") as client:
            wait_until(lambda: client.status().running == 0 and not door.engine.open)
            door.engine.running.set()
            assert client.generate("ab", max_tokens=2).text == "ab"


def test_a_stopped_client_loses_its_lease() -> None:
    code = (
        "from fastserve_hpc.client import Client; c = Client('test')\n"
        "print(next(c.stream('x', max_tokens=90000)).text, flush=True)\n"
        "s = c.stream('y', max_tokens=90000); next(s); print('ready', flush=True); input()"
    )
    with FrontDoor(lease_s=1.0, turn_s=0.05) as door:
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ
        )
        assert child.stdout is not None
        assert [child.stdout.readline() for _ in range(2)] == ["x\n", "ready\n"]
        wait_until(lambda: len(door.engine.open) == 1)  # the dropped stream is cancelled at once
        child.send_signal(signal.SIGSTOP)
        try:
            wait_until(lambda: not door.engine.open, within_s=6.0)
        finally:
            child.kill()
            child.communicate()


def garbage(rng: random.Random) -> list[bytes]:
    whole = protocol.encode(Submit(1, prompt="x" * 50))[1]
    kinds = [
        lambda: [b""],
        lambda: [b"", b""],
        lambda: [rng.randbytes(rng.randrange(1, 200))],
        lambda: [protocol.MAGIC, rng.randbytes(rng.randrange(0, 200))],
        lambda: [protocol.MAGIC[:-1] + b"\x63", whole],
        lambda: [protocol.MAGIC, pickle.dumps({"type": "submit", "id": 1})],
        lambda: [protocol.MAGIC] * rng.randrange(3, 9),
        lambda: [protocol.MAGIC, whole[: rng.randrange(len(whole))]],
        lambda: [protocol.MAGIC, whole.replace(b"submit", rng.randbytes(6))],
    ]
    return rng.choice(kinds)()


def test_ten_thousand_frames_of_garbage_are_answered_and_cost_no_memory(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    rng = random.Random(0)
    with FrontDoor() as door:
        socket = raw(context, door.address)
        before, answered = 0, 0
        for i in range(10_000):
            socket.send_multipart(garbage(rng))
            while socket.poll(0 if i % 100 else 2):
                answered += isinstance(receive(socket), Failed)
            if i == 2000:
                before = rss_bytes(door.process.pid)
        while socket.poll(300):
            answered += isinstance(receive(socket), Failed)
        assert answered == 10_000
        assert rss_bytes(door.process.pid) - before < 4 * 2**20
        with Client("test") as client:
            assert client.generate("ab", max_tokens=2).text == "ab"


def test_a_message_over_the_limit_costs_its_sender_the_connection(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with FrontDoor() as door:
        before = rss_bytes(door.process.pid)
        for _ in range(3):
            socket = raw(context, door.address)
            socket.send_multipart([protocol.MAGIC, b"\0" * (100 * 2**20)])
            assert not socket.poll(200)
            socket.close(0)
        assert rss_bytes(door.process.pid) - before < 64 * 2**20
        with Client("test") as client:
            assert client.generate("ab", max_tokens=2).text == "ab"


def test_who_sends_garbage_and_never_reads_costs_no_memory(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with FrontDoor() as door:
        socket = raw(context, door.address, rcvhwm=1, sndtimeo=2000)
        for _ in range(3000):
            socket.send_multipart([protocol.MAGIC, b"x"])
        before = rss_bytes(door.process.pid)
        for _ in range(20_000):
            socket.send_multipart([protocol.MAGIC, b"x"])
        assert rss_bytes(door.process.pid) - before < 8 * 2**20


def test_a_slow_reader_gets_merged_deltas_and_the_whole_text(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    num_tokens = 20_000
    with FrontDoor(turn_s=0.0) as door:
        socket = raw(context, door.address, rcvhwm=1, rcvbuf=4096)
        before = rss_bytes(door.process.pid)
        params = protocol.SamplingParams(max_tokens=num_tokens)
        socket.send_multipart(protocol.encode(Submit(1, prompt="abcdefg", sampling=params)))
        wait_until(lambda: len(door.engine.requests) == 1 and not door.engine.open, within_s=30.0)
        with Client("test") as other:  # nobody else waits
            assert other.generate("ab", max_tokens=2).text == "ab"
        assert rss_bytes(door.process.pid) - before < 16 * 2**20
        deltas = []
        while not deltas or deltas[-1].finish_reason is None:
            answer = receive(socket)
            if isinstance(answer, Delta):
                deltas.append(answer)
    assert "".join(d.text for d in deltas) == ("abcdefg" * num_tokens)[:num_tokens]
    assert sum(len(d.token_ids) for d in deltas) == num_tokens
    assert len(deltas) < num_tokens / 2


def test_tcp_lets_in_the_key_of_the_endpoint_file_and_no_other(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with FrontDoor(tcp=True) as door:
        keys = door.endpoint.keys
        assert keys is not None
        address = next(a for a in door.endpoint.addresses if a.startswith("tcp://"))
        for public, secret in (zmq.curve_keypair(), (b"", b"")):
            socket = context.socket(zmq.DEALER)
            socket.linger = 0
            if public:
                socket.curve_serverkey = keys.server_public.encode()
                socket.curve_publickey, socket.curve_secretkey = public, secret
            socket.connect(address)
            socket.send_multipart(protocol.encode(Ping(1)))
            socket.send_multipart(protocol.encode(Submit(2, prompt="x")))
            assert not socket.poll(700)
        assert not door.engine.requests
        with Client(address) as client:
            assert client.generate("ab", max_tokens=2).text == "ab"


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


def test_the_end_tells_the_waiting_and_takes_the_files_back(home: Path) -> None:
    door = FrontDoor()
    with Client("test") as client:
        door.engine.running.clear()
        running = client.stream("ab", max_tokens=2)
        wait_until(lambda: len(door.engine.open) == 1)
        door.engine.send(EngineOutput(state="ended"))
        with pytest.raises(EndpointError, match="ended"):
            next(running)
    wait_until(lambda: not door.directory.exists())
    assert list((home / "endpoints").iterdir()) == []
    door.close()


def test_without_its_coordinator_it_says_so_and_leaves(home: Path) -> None:
    door = FrontDoor()
    with Client("test") as client:
        running = client.stream("ab", max_tokens=90_000)
        next(running)
        door.engine.stop()
        door.process.queue.close()
        with pytest.raises(EndpointError, match="ended unexpectedly"):
            list(running)
    door.process.close()
    assert not door.directory.exists()
    assert list((home / "endpoints").iterdir()) == []


def test_while_the_model_loads_status_is_answered_and_requests_wait() -> None:
    with FrontDoor(ready=False, world_size=4, tp=2, pp=2) as door, Client("test") as client:
        assert find("test").state == "starting"
        status_now = client.status()
        assert (status_now.state, status_now.world_size, status_now.tp) == ("starting", 4, 2)
        early = client.stream("ab", max_tokens=2)
        door.engine.send(EngineOutput(state="ready"))
        assert "".join(e.text for e in early) == "ab"
        wait_until(lambda: find("test").state == "ready")
        assert client.status() == status()


def test_an_engine_error_fails_the_request_with_its_words() -> None:
    with FrontDoor() as door, Client("test") as client:
        door.engine.running.clear()
        running = client.stream("ab", max_tokens=2)
        wait_until(lambda: len(door.engine.open) == 1)
        door.engine.send(EngineOutput(deltas=[TokenDelta(1, finish_reason="error", error="the blocks are on fire")]))
        with pytest.raises(RequestError, match="on fire"):
            next(running)


def test_it_is_no_rank_and_keeps_nothing_open_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    os.set_inheritable(write_end, True)
    for name, value in (
        ("PMI_FD", str(write_end)),
        ("PMIX_RANK", "0"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("PMI_RANK", "0"),
    ):
        monkeypatch.setenv(name, value)
    with FrontDoor() as door:
        process = Path(f"/proc/{door.process.pid}")
        names = {entry.split(b"=")[0].decode() for entry in (process / "environ").read_bytes().split(b"\0")}
        assert not [n for n in names if n.startswith(("PMI", "OMPI_", "HYDRA"))]
        pipe = os.readlink(f"/proc/self/fd/{write_end}")
        assert pipe not in [os.readlink(fd) for fd in (process / "fd").iterdir()]
        assert os.getsid(door.process.pid) == door.process.pid
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(door.process.pid, number)
        with Client("test") as client:
            assert client.generate("ab", max_tokens=2).text == "ab"
        maps = (process / "maps").read_text()
        assert "torch" not in maps
        assert "libmpi" not in maps
    os.close(read_end)
    os.close(write_end)


def test_idle_it_uses_no_cpu() -> None:
    with FrontDoor() as door, Client("test") as client:
        client.generate("ab", max_tokens=2)
        time.sleep(0.2)
        fields = [Path(f"/proc/{door.process.pid}/stat").read_text().rpartition(")")[2].split() for _ in range(1)]
        time.sleep(2.0)
        fields.append(Path(f"/proc/{door.process.pid}/stat").read_text().rpartition(")")[2].split())
    ticks = [int(f[11]) + int(f[12]) for f in fields]
    assert ticks[1] - ticks[0] <= 2


def test_what_the_user_can_cure_comes_back_as_the_error_it_is(tmp_path: Path) -> None:
    with FrontDoor():
        process = IngressProcess(settings())
        with process, pytest.raises(ConfigError, match="--endpoint test: a server of that name is running"):
            process.wait_started()
    process = IngressProcess(settings(model_path=str(tmp_path / "none.gguf")))
    with process, pytest.raises(ModelError, match=r"none\.gguf"):
        process.wait_started()


def test_two_servers_without_a_name_are_default_and_default_2() -> None:
    processes = [IngressProcess(settings(endpoint=None)) for _ in range(2)]
    names = {p.wait_started().name for p in processes}
    for process in processes:
        process.close()
    assert names == {"default", "default-2"}


def test_a_long_tmpdir_and_a_wide_umask_are_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    before = os.umask(0)
    try:
        with FrontDoor() as door, Client("test") as client:
            assert client.generate("ab", max_tokens=2).text == "ab"
            socket_file = door.directory / "clients"
            modes = [p.stat().st_mode & 0o777 for p in (endpoints_dir() / "test.json", door.directory, socket_file)]
            assert modes == [0o600, 0o700, 0o600]
            assert endpoints_dir().stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


def test_endpoint_file_of_a_killed_server_is_taken_over(home: Path) -> None:
    code = (
        "import time\nfrom front_door import settings\n"
        "from fastserve_hpc.server.ingress_process import IngressProcess\n"
        "p = IngressProcess(settings()); p.wait_started(); print(p.pid, flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=_with_tests())
    assert child.stdout is not None
    ingress = int(child.stdout.readline())
    os.kill(ingress, signal.SIGKILL)  # so that nobody takes the file back
    child.kill()
    child.communicate()
    left: Endpoint = protocol.msgspec.json.decode((home / "endpoints" / "test.json").read_bytes(), type=Endpoint)
    assert left.is_dead()
    with pytest.raises(EndpointError, match="has ended"):
        find("test")
    with FrontDoor() as door:
        assert find("test").instance_id == door.endpoint.instance_id != left.instance_id


def _with_tests() -> dict[str, str]:
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    return {**os.environ, "PYTHONPATH": path}
