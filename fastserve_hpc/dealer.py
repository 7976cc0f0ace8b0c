"""A client's ZeroMQ socket: the same for the client library and for a server that asks whether another lives."""

from __future__ import annotations

from typing import TypeVar

import zmq

from fastserve_hpc.endpoint import CurveKeys

_HANDSHAKE_S = 10.0

AnySocket = TypeVar("AnySocket", bound="zmq.Socket[bytes]")


def prepare(socket: AnySocket, keys: CurveKeys | None, *, linger_s: float) -> AnySocket:
    """Options of a DEALER, to be set before it connects. A lost connection is an event of its monitor."""
    socket.linger = int(linger_s * 1000)
    socket.ipv6 = True
    socket.handshake_ivl = int(_HANDSHAKE_S * 1000)
    # With a full receive queue libzmq reads nothing, the server's heartbeats neither, and the server would take a
    # client for dead that is only slow. (Heartbeats from this side as well would even abort the process: when
    # they time out for that reason, libzmq 4.3 fails an assertion as soon as the queue is read again.) What is
    # received in advance is bounded by what the client has asked for.
    socket.rcvhwm = 0
    if keys is not None:
        socket.curve_serverkey = keys.server_public.encode()
        socket.curve_publickey = keys.client_public.encode()
        socket.curve_secretkey = keys.client_secret.encode()
    return socket
