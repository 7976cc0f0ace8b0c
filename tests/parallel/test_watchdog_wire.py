"""Frames and handshakes between watchdogs."""

import socket
import threading
import time

import pytest

from fastserve_hpc.parallel.addresses import LOOPBACK, host_key, local_addresses
from fastserve_hpc.parallel.watchdog_join import Listener, Rendezvous, join
from fastserve_hpc.parallel.watchdog_wire import (
    Frame,
    HandshakeError,
    Kind,
    Link,
    admit_client,
    prove_to_server,
)


@pytest.fixture
def pair():
    server = socket.create_server((LOOPBACK, 0))
    client = socket.create_connection(server.getsockname())
    accepted, _ = server.accept()
    server.close()
    yield accepted, client
    accepted.close()
    client.close()


def shake_hands(pair, server_secret, client_secret, rank=3):
    """What each side says of the other: a rank, None or an error."""
    outcome = {}

    def admit():
        try:
            outcome["server"] = admit_client(pair[0], server_secret, time.monotonic() + 2)
        except (HandshakeError, OSError) as error:
            outcome["server"] = error
            pair[0].close()

    thread = threading.Thread(target=admit)
    thread.start()
    try:
        prove_to_server(pair[1], client_secret, rank, time.monotonic() + 2)
    except (HandshakeError, OSError) as error:
        outcome["client"] = error
    thread.join()
    return outcome


def test_both_sides_prove_the_secret(pair):
    assert shake_hands(pair, b"secret", b"secret") == {"server": 3}


def test_a_wrong_secret_is_turned_away(pair):
    outcome = shake_hands(pair, b"secret", b"guess")
    assert "does not know the secret" in str(outcome["server"])
    assert "hung up" in str(outcome["client"])


def test_a_server_that_does_not_know_the_secret_is_not_joined(pair):
    pair[0].sendall(b"fastserve-watch1" + bytes(16) + bytes(32))
    with pytest.raises(HandshakeError, match="does not know the secret"):
        prove_to_server(pair[1], b"secret", 1, time.monotonic() + 2)


def test_some_other_service_is_not_joined(pair):
    pair[0].sendall(b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n")
    with pytest.raises(HandshakeError, match="not a watchdog"):
        prove_to_server(pair[1], b"secret", 1, time.monotonic() + 2)


def test_a_claim_cannot_be_replayed_to_another_greeting(pair):
    pair[0].sendall(b"fastserve-watch1" + bytes(16))
    with pytest.raises((HandshakeError, OSError)):
        prove_to_server(pair[1], b"secret", 1, time.monotonic() + 0.2)
    claim = pair[0].recv(100)
    assert len(claim) == 52
    pair[1].sendall(claim)
    with pytest.raises(HandshakeError, match="does not know the secret"):
        admit_client(pair[0], b"secret", time.monotonic() + 2)


def test_dripping_bytes_does_not_prolong_the_deadline(pair):
    stop = threading.Event()

    def drip():
        while not stop.wait(0.02):
            pair[1].send(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    started = time.monotonic()
    with pytest.raises((HandshakeError, TimeoutError)):
        admit_client(pair[0], b"secret", started + 0.3)
    assert time.monotonic() - started < 0.8
    stop.set()
    thread.join()


def receive_all(link, count):
    frames = []
    deadline = time.monotonic() + 5
    while len(frames) < count and time.monotonic() < deadline:
        frames += link.receive()
    return frames


def test_frames_arrive_whole_and_in_order(pair):
    sender, receiver = Link(pair[0], 1), Link(pair[1], 0)
    sent = [Frame(Kind.HELLO, b"rank 1"), Frame(Kind.BEAT), Frame(Kind.ABORT, bytes(40_000)), Frame(Kind.BYE)]
    for frame in sent:
        sender.send(frame.kind, frame.payload, patience_s=1)
    assert receive_all(receiver, 4) == sent
    assert receiver.receive() == []
    assert receiver.is_open
    sender.end_sending()
    sender.close()
    time.sleep(0.05)
    assert receiver.receive() == []
    assert not receiver.is_open


@pytest.mark.parametrize("garbage", [b"\x63\0\0\0\0", b"\x02\xff\xff\xff\xff"])
def test_garbage_closes_the_link(pair, garbage):
    link = Link(pair[1], 0)
    pair[0].sendall(garbage)
    time.sleep(0.05)
    assert link.receive() == []
    assert not link.is_open


def test_the_first_address_that_proves_itself_wins():
    deaf = socket.create_server((LOOPBACK, 0))
    listener = Listener(one_host=True)
    good = listener.rendezvous
    links = []
    thread = threading.Thread(target=lambda: links.extend(listener.gather([5], 10)))
    thread.start()
    # 127.0.0.2 refuses at this port: the listener is on 127.0.0.1 only.
    link, address = join(Rendezvous(("127.0.0.2", LOOPBACK), good.port, good.secret), 5, 10)
    thread.join()
    assert address == LOOPBACK
    assert [each.rank for each in links] == [5]
    link.close()
    links[0].close()
    deaf.close()


def test_local_addresses_end_with_loopback_and_are_real():
    addresses = local_addresses()
    assert addresses[-1] == LOOPBACK
    assert len(set(addresses)) == len(addresses)
    for address in addresses:
        socket.create_server((address, 0)).close()


def test_the_host_key_is_stable():
    assert host_key() == host_key()
