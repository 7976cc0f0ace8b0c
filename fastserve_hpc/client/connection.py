"""One ZeroMQ connection to a server. `connect` waits; the connection itself never does."""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Sequence
from pathlib import Path

import zmq

from fastserve_hpc import protocol
from fastserve_hpc.dealer import prepare
from fastserve_hpc.endpoint import CurveKeys, Endpoint, without_ended_jobs
from fastserve_hpc.errors import EndpointError
from fastserve_hpc.protocol import Ping, ProtocolError, Welcome

LINGER_S = 1.0
_HANDSHAKE_ID = 0
_LOOK_S = 0.2
"""How often a server that does not answer yet is looked at."""
_PATIENCE_S = 1.0
"""After so long Slurm is asked whether the server's job still runs."""
_EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class Connection:
    """A DEALER and the monitor that tells when its connection is lost. It is not used again after that."""

    def __init__(self, address: str, keys: CurveKeys | None) -> None:
        self.address = address
        self.was_lost = False
        self.was_refused = False
        # The context of the whole process: one of our own could not be ended in a client that nobody closed
        # without the danger of waiting for ever in the garbage collector.
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.socket = prepare(context.socket(zmq.DEALER), keys, linger_s=LINGER_S)
        self.monitor = self.socket.get_monitor_socket(_EVENTS)
        self.socket.connect(address)

    def send(self, frames: Sequence[bytes]) -> bool:
        """Whether it was sent; else the server has not read what was sent before."""
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[list[bytes]]:
        """All messages that have arrived, the last ones also when the connection is lost."""
        self._read_monitor()
        messages: list[list[bytes]] = []
        with contextlib.suppress(zmq.Again):
            while True:
                messages.append(self.socket.recv_multipart(zmq.NOBLOCK))
        return messages

    def close(self, linger_s: float = LINGER_S) -> None:
        """What was sent last has so long to go out; that is not waited for."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0 if self.was_lost else int(linger_s * 1000))

    def _read_monitor(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                event, _value = struct.unpack("=HI", self.monitor.recv_multipart(zmq.NOBLOCK)[0])
                self.was_lost = self.was_lost or event == zmq.EVENT_DISCONNECTED
                self.was_refused = self.was_refused or event == zmq.EVENT_HANDSHAKE_FAILED_AUTH


def connect(endpoint: Endpoint, timeout_s: float) -> Connection:
    """A connection to the server that the endpoint describes, by the first of its addresses that answers.

    Raises `EndpointError` if none does, or if another server answers.
    """
    addresses = _addresses(endpoint)
    candidates = [Connection(a, endpoint.keys if a.startswith("tcp://") else None) for a in addresses]
    winner = None
    try:
        winner = _race(candidates, endpoint, timeout_s)
    finally:
        for candidate in candidates:
            if candidate is not winner:
                candidate.close(linger_s=0)
    return winner


def _addresses(endpoint: Endpoint) -> list[str]:
    """The socket file alone if it is there, else all that this host may reach."""
    addresses = endpoint.reachable_addresses()
    files = [a for a in addresses if a.startswith("ipc://") and Path(a.removeprefix("ipc://")).exists()]
    others = [a for a in addresses if not a.startswith("ipc://")]
    if not files and not others:
        host = endpoint.process.host if endpoint.process else None
        where = f"it listens on host {host} alone: run the client there, or start it with --tcp"
        gone = f"its socket {', '.join(endpoint.addresses)} is gone: it has ended"
        raise EndpointError(f"endpoint {endpoint.name!r} cannot be reached: {gone if addresses else where}")
    return files[:1] or others


def _race(candidates: list[Connection], endpoint: Endpoint, timeout_s: float) -> Connection:
    poller = zmq.Poller()
    for candidate in candidates:
        candidate.send(protocol.encode(Ping(_HANDSHAKE_ID)))
        poller.register(candidate.socket, zmq.POLLIN)
        poller.register(candidate.monitor, zmq.POLLIN)
    began = time.monotonic()
    deadline, doubts = began + timeout_s, endpoint.is_of_a_job_elsewhere
    while (left := deadline - time.monotonic()) > 0 and not all(c.was_refused for c in candidates):
        _check_alive(candidates, endpoint)
        if doubts and time.monotonic() - began > _PATIENCE_S:
            doubts = False
            _check_job(endpoint)
        poller.poll(int(min(left, _LOOK_S) * 1000) + 1)
        for candidate in candidates:
            for frames in candidate.receive():
                _check_welcome(frames, endpoint, candidate.address)
                candidate.was_lost = False
                return candidate
    raise EndpointError(_why_nobody(candidates, endpoint, timeout_s))


def _check_alive(candidates: Sequence[Connection], endpoint: Endpoint) -> None:
    """Raise `EndpointError` if the server has ended meanwhile: libzmq would go on trying."""
    files = [Path(c.address.removeprefix("ipc://")) for c in candidates if c.address.startswith("ipc://")]
    is_gone = len(files) == len(candidates) and not any(file.exists() for file in files)
    if is_gone or endpoint.is_dead():
        raise EndpointError(f"the server of endpoint {endpoint.name!r} has ended")


def _check_job(endpoint: Endpoint) -> None:
    """Raise `EndpointError` if Slurm knows that the server's job is over."""
    if not without_ended_jobs([endpoint]):
        raise EndpointError(
            f"the server of endpoint {endpoint.name!r} was killed: its Slurm job {endpoint.job_id} is over"
        )


def _check_welcome(frames: list[bytes], endpoint: Endpoint, address: str) -> None:
    try:
        message = protocol.decode_to_client(frames)
    except ProtocolError as error:
        raise EndpointError(f"endpoint {endpoint.name!r} at {address}: {error}") from None
    if not isinstance(message, Welcome):
        raise EndpointError(f"endpoint {endpoint.name!r} at {address} answered a ping with {message}")
    if endpoint.instance_id not in (None, message.instance_id):
        raise EndpointError(
            f"another server answers at {address} of endpoint {endpoint.name!r}: its file is out of date, "
            "which a network file system may show for a minute; try again then"
        )


def _why_nobody(candidates: Sequence[Connection], endpoint: Endpoint, timeout_s: float) -> str:
    places = ", ".join(c.address for c in candidates)
    if all(c.was_refused for c in candidates):
        return f"endpoint {endpoint.name!r} at {places} refuses this key: use the endpoint file that it wrote itself"
    return (
        f"endpoint {endpoint.name!r}: nobody answers at {places} within {timeout_s:g} s; "
        "the server was killed, hangs, or cannot be reached from this host"
    )
