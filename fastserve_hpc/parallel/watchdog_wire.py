"""What watchdogs say to each other: a handshake that proves both sides know the secret, then small frames."""

from __future__ import annotations

import enum
import hmac
import secrets
import socket
import struct
import time
from dataclasses import dataclass

_MAGIC = b"fastserve-watch1"
_NONCE_BYTES = 16
_PROOF_BYTES = 32
_CLAIM = struct.Struct(f"!I{_NONCE_BYTES}s{_PROOF_BYTES}s")
_HEADER = struct.Struct("!BI")
_MAX_PAYLOAD_BYTES = 64 * 1024


class HandshakeError(Exception):
    """The other side is a stranger, too slow or gone."""


class Kind(enum.IntEnum):
    """What a frame says."""

    HELLO = 1
    """Payload: who the sender is, for messages to people. Rank 0's means that all ranks are connected."""
    BEAT = 2
    BYE = 3
    """The sender ends as planned: do not miss it."""
    ABORT = 4
    """Payload: exit code (one byte) and why. To rank 0: print it and end everyone. From rank 0: end now."""
    ALLOW = 5
    """Payload: seconds (a double) that the sender may be silent from now on."""
    WAKE = 6
    """Work is coming: do not doze."""


@dataclass(frozen=True, slots=True)
class Frame:
    kind: Kind
    payload: bytes = b""


def prove_to_server(connection: socket.socket, secret: bytes, rank: int, deadline: float) -> None:
    """The joining rank's side of the handshake. Raises `HandshakeError`."""
    greeting = _receive_exactly(connection, len(_MAGIC) + _NONCE_BYTES, deadline)
    if not greeting.startswith(_MAGIC):
        raise HandshakeError("the other side is not a watchdog")
    theirs, ours = greeting[len(_MAGIC) :], secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(_CLAIM.pack(rank, ours, _proof(secret, b"rank", rank, theirs, ours)))
    answer = _receive_exactly(connection, _PROOF_BYTES, deadline)
    if not hmac.compare_digest(answer, _proof(secret, b"server", rank, theirs, ours)):
        raise HandshakeError("the other side does not know the secret")


def admit_client(connection: socket.socket, secret: bytes, deadline: float) -> int:
    """Rank 0's side of the handshake; returns the rank that has joined. Raises `HandshakeError`."""
    ours = secrets.token_bytes(_NONCE_BYTES)
    connection.settimeout(_time_left(deadline))
    connection.sendall(_MAGIC + ours)
    rank, theirs, claim = _CLAIM.unpack(_receive_exactly(connection, _CLAIM.size, deadline))
    if not hmac.compare_digest(claim, _proof(secret, b"rank", rank, ours, theirs)):
        raise HandshakeError("the other side does not know the secret")
    connection.sendall(_proof(secret, b"server", rank, ours, theirs))
    return int(rank)


def _proof(secret: bytes, role: bytes, rank: int, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return hmac.digest(secret, b"|".join((role, b"%d" % rank, server_nonce, client_nonce)), "sha256")


def _receive_exactly(connection: socket.socket, size: int, deadline: float) -> bytes:
    # The deadline holds for the whole: a stranger must not live on by dripping bytes.
    data = bytearray()
    while len(data) < size:
        connection.settimeout(_time_left(deadline))
        chunk = connection.recv(size - len(data))
        if not chunk:
            raise HandshakeError("the other side hung up")
        data += chunk
    return bytes(data)


def _time_left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise HandshakeError("the other side is too slow")
    return left


class Link:
    """An authenticated connection that carries frames. Sending never blocks for long, receiving never blocks."""

    def __init__(self, connection: socket.socket, rank: int) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._data = bytearray()
        self.rank = rank
        self.identity = ""
        self.is_open = True
        self.said_bye = False
        self.last_heard = time.monotonic()
        self.allowance_s = 0.0
        """How long the other side may be silent; 0 as long as nobody has said."""

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, kind: Kind, payload: bytes = b"", patience_s: float = 0.0) -> None:
        """Send a frame if the connection takes it within `patience_s`; the loss of a beat is no harm."""
        payload = payload[:_MAX_PAYLOAD_BYTES]
        try:
            self._connection.settimeout(patience_s)
            self._connection.sendall(_HEADER.pack(kind, len(payload)) + payload)
        except OSError:
            return  # a broken connection shows when reading

    def receive(self) -> list[Frame]:
        """The frames that are here; clears `is_open` where the other side has ended the connection."""
        try:
            self._connection.settimeout(0.0)
            chunk = self._connection.recv(_MAX_PAYLOAD_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            chunk = b""
        self.is_open = bool(chunk)
        self.last_heard = time.monotonic()
        self._data += chunk
        try:
            return self._take_frames()
        except ValueError:
            self.is_open = False
            return []

    def end_sending(self) -> None:
        """Nothing follows; what has been sent still arrives."""
        try:
            self._connection.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def close(self) -> None:
        self._connection.close()

    def _take_frames(self) -> list[Frame]:
        frames = []
        while len(self._data) >= _HEADER.size:
            kind, size = _HEADER.unpack_from(self._data)
            if size > _MAX_PAYLOAD_BYTES:
                raise ValueError(f"a frame of {size} bytes")
            end = _HEADER.size + size
            if len(self._data) < end:
                break
            frames.append(Frame(Kind(kind), bytes(self._data[_HEADER.size : end])))
            del self._data[:end]
        return frames
