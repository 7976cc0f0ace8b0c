"""The ingress and clients that vanish, hang, flood, send garbage or have no key."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import signal
import subprocess
import sys
import time

import zmq
from front_door import EOS, FrontDoor, ToyEngine, raw, receive, rss_bytes, wait_until

from fastserve_hpc import protocol
from fastserve_hpc.client import Client
from fastserve_hpc.core.request import ModelLimits
from fastserve_hpc.protocol import Delta, Failed, Ping, Submit


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


def test_while_the_coordinator_does_not_read_clients_wait_and_memory_stays_bounded(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    prompt = [70_000] * 90_000  # five bytes each
    with FrontDoor(limits=ModelLimits(80_000, 100_000, (EOS,))) as door:
        door.engine.stop()
        before = rss_bytes(door.process.pid)
        socket = raw(context, door.address, sndhwm=10, sndtimeo=500)
        num_sent = 0
        with contextlib.suppress(zmq.Again):
            for num_sent in range(1, 500):
                params = protocol.SamplingParams(max_tokens=1)
                submit = Submit(num_sent, prompt=prompt, sampling=params, stream=False)
                socket.send_multipart(protocol.encode(submit))
        assert num_sent < 400  # it stopped reading, so we had to stop sending
        assert rss_bytes(door.process.pid) - before < 400 * 2**20
        door.engine = ToyEngine(door.process.queue)
        door.engine.start()
        num_answered = 0
        while num_answered < num_sent - 1:
            num_answered += isinstance(receive(socket, 10.0), Delta | Failed)
        with Client("test") as client:
            assert client.generate("ab", max_tokens=2).text == "ab"
