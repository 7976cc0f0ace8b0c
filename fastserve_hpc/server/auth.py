"""Who may enter by TCP: CURVE encrypts, the allow-list of client keys decides."""

from __future__ import annotations

from collections.abc import Collection

import zmq
from zmq.utils import z85

from fastserve_hpc.endpoint import CurveKeys

_ADDRESS = "inproc://zeromq.zap.01"
_VERSION = b"1.0"


def make_keys() -> tuple[CurveKeys, bytes]:
    """Fresh keys for one server: those for its endpoint file, and the server's secret key, which never leaves it."""
    server_public, server_secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    return CurveKeys(server_public.decode(), client_public.decode(), client_secret.decode()), server_secret


class AllowList:
    """Answers libzmq's questions (ZAP, RFC 27). It is there before the door: without it CURVE lets everybody in."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: Collection[str]) -> None:
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ADDRESS)
        self._allowed = frozenset(z85.decode(key) for key in allowed)
        self.num_refused = 0

    def answer(self) -> None:
        """Answer all questions that wait; never blocks."""
        while self.socket.poll(0):
            self.socket.send_multipart(self._verdict(self.socket.recv_multipart()))

    def _verdict(self, question: list[bytes]) -> list[bytes]:
        # version, request id, domain, address, identity, mechanism, then the client's public key
        request_id = question[1]
        if question[0] == _VERSION and question[5:6] == [b"CURVE"] and question[6] in self._allowed:
            return [_VERSION, request_id, b"200", b"OK", b"", b""]
        self.num_refused += 1
        return [_VERSION, request_id, b"400", b"this key is not allowed", b"", b""]

    def close(self) -> None:
        self.socket.close()
