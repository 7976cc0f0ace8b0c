"""The ingress's ROUTER sockets: a socket file in the private directory, and TCP with keys where asked for."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from pathlib import Path
from typing import NamedTuple

import zmq

from fastserve_hpc.endpoint import CurveKeys
from fastserve_hpc.errors import ConfigError
from fastserve_hpc.protocol import MAX_MESSAGE_BYTES

# Messages in memory per client: few in, for one may have 16 MiB; more out, where deltas are small.
RECEIVE_HWM = 16
SEND_HWM = 256
_SIOCGIFADDR = 0x8915


class Peer(NamedTuple):
    """A client's connection. libzmq never gives an identity twice."""

    door: int
    identity: bytes


class Blocked(Exception):
    """The client does not read; what was sent before fills its queue."""


class Unreachable(Exception):
    """The client is gone."""


class Door:
    """One ROUTER socket, which never drops a message silently."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], number: int, lease_s: float) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self._number = number
        self.socket.linger = 1000
        self.socket.router_mandatory = True
        self.socket.maxmsgsize = MAX_MESSAGE_BYTES
        self.socket.rcvhwm = RECEIVE_HWM
        self.socket.sndhwm = SEND_HWM
        self.socket.handshake_ivl = 10_000
        self.socket.backlog = 1024
        # A client that does not answer the heartbeats loses its connection, and that ends its lease.
        self.socket.heartbeat_ivl = max(1, int(lease_s * 1000 / 3))
        self.socket.heartbeat_timeout = max(1, int(lease_s * 1000))

    def receive(self) -> tuple[Peer, list[bytes]] | None:
        """A message, if one has arrived; never blocks."""
        try:
            identity, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return Peer(self._number, identity), frames

    def send(self, identity: bytes, frames: list[bytes]) -> None:
        """Send without waiting. Raises `Blocked` or `Unreachable`, and has then sent nothing."""
        try:
            self.socket.send_multipart([identity, *frames], zmq.NOBLOCK)
        except zmq.Again:
            raise Blocked from None
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise Unreachable from None

    def close(self) -> None:
        self.socket.close()


def open_socket_file(door: Door, directory: Path) -> str:
    """Listen in the private directory; the address."""
    path = directory / "clients"
    door.socket.bind(f"ipc://{path}")
    path.chmod(0o600)
    return f"ipc://{path}"


def open_tcp(door: Door, keys: CurveKeys, secret: bytes) -> list[str]:
    """Listen on a free port of all interfaces, for clients with the right key; the addresses, likeliest first."""
    door.socket.ipv6 = True
    door.socket.curve_server = True
    door.socket.curve_publickey = keys.server_public.encode()
    door.socket.curve_secretkey = secret
    try:
        door.socket.bind("tcp://*:0")
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot listen on TCP: {error}; start without --tcp to serve this host alone") from error
    port = door.socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    return [f"tcp://{host}:{port}" for host in own_hosts()]


def own_hosts() -> list[str]:
    """This host's name, then the IPv4 addresses of its interfaces, for clients that cannot resolve the name."""
    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, interface in socket.if_nameindex():
            request = struct.pack("256s", os.fsencode(interface)[:15])
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:
                continue  # down, or without an IPv4 address
            addresses.append(socket.inet_ntoa(answer[20:24]))
    loopback = [a for a in addresses if a.startswith("127.")]
    return [socket.gethostname(), *([a for a in addresses if a not in loopback] or loopback)]
