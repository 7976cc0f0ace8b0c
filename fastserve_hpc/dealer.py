"""A client's ZeroMQ socket: the same for the client library and for a server that asks whether another lives."""

from __future__ import annotations

from typing import TypeVar

import zmq

from fastserve_hpc.endpoint import CurveKeys

HEARTBEAT_S = 5.0
HEARTBEAT_TIMEOUT_S = 20.0
_HANDSHAKE_S = 10.0

AnySocket = TypeVar("AnySocket", bound="zmq.Socket[bytes]")


def prepare(socket: AnySocket, keys: CurveKeys | None, *, linger_s: float) -> AnySocket:
    """Options of a DEALER, to be set before it connects. A lost connection is an event of its monitor."""
    socket.linger = int(linger_s * 1000)
    socket.ipv6 = True
    socket.heartbeat_ivl = int(HEARTBEAT_S * 1000)
    socket.heartbeat_timeout = int(HEARTBEAT_TIMEOUT_S * 1000)
    socket.handshake_ivl = int(_HANDSHAKE_S * 1000)
    if keys is not None:
        socket.curve_serverkey = keys.server_public.encode()
        socket.curve_publickey = keys.client_public.encode()
        socket.curve_secretkey = keys.client_secret.encode()
    return socket
