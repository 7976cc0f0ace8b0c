"""The two local queues between the coordinator and the ingress process: one socket pair.

A socket pair has no name that a stranger could open, and its end of file tells either side at
once that the other has died. Frames are a 4-byte length and one msgpack message (`queues.py`).
Nothing here blocks but `CoordinatorQueue.poll` with a timeout; what the kernel does not take at
once waits in a buffer whose size is bounded.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time

from fastserve_hpc.errors import FastServeError
from fastserve_hpc.server import queues
from fastserve_hpc.server.queues import EngineCommands, EngineOutput

_HEADER_BYTES = 4
_READ_BYTES = 1 << 20
_MAX_READS = 16
"""Reads per call, so that a fast writer cannot keep the reader from its other work."""
MAX_BACKLOG_BYTES = 256 * 2**20
"""Output that the ingress has not read; more means that it hangs."""


class IngressError(FastServeError):
    """The ingress process died or hangs; the server cannot go on."""


class QueueClosed(Exception):
    """The other side has closed its end or died."""


class FrameStream:
    """Length-prefixed frames over a non-blocking stream socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._incoming = bytearray()
        self._outgoing = bytearray()

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def backlog_bytes(self) -> int:
        """Bytes that wait for the other side to read."""
        return len(self._outgoing)

    def write(self, payload: bytes) -> None:
        """Queue a frame and send what the kernel takes. Raises `QueueClosed`."""
        self._outgoing += len(payload).to_bytes(_HEADER_BYTES, "little") + payload
        self.flush()

    def flush(self) -> None:
        """Send what the kernel takes of the backlog. Raises `QueueClosed`."""
        try:
            while self._outgoing:
                sent = self._sock.send(self._outgoing)
                del self._outgoing[:sent]
        except BlockingIOError:
            return
        except OSError as error:
            raise QueueClosed from error

    def read(self, limit: int | None = None) -> list[bytes]:
        """The whole frames that have arrived, at most `limit`. Raises `QueueClosed` after the last one."""
        ended = self._fill()
        frames = self._split(limit)
        if ended and not frames:
            raise QueueClosed
        return frames

    def wait(self, timeout_s: float, alarm: socket.socket | None = None) -> None:
        """Until there is something to read (from `alarm`, too) or, with a backlog, the kernel takes more of it."""
        poller = select.poll()
        if alarm is not None:
            poller.register(alarm, select.POLLIN)
        poller.register(self._sock, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        poller.poll(timeout_s * 1000)

    def read_one(self, timeout_s: float) -> bytes:
        """The next frame alone; those after it stay. Raises `QueueClosed` or `TimeoutError`."""
        deadline = time.monotonic() + timeout_s
        while not (frames := self.read(limit=1)):
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            self.wait(left)
        return frames[0]

    def close(self) -> None:
        self._sock.close()

    def _fill(self) -> bool:
        """Take bytes from the kernel; True at the end of the stream."""
        try:
            for _ in range(_MAX_READS):
                data = self._sock.recv(_READ_BYTES)
                if not data:
                    return True
                self._incoming += data
                if len(data) < _READ_BYTES:
                    break
        except BlockingIOError:
            pass
        except OSError:
            return True
        return False

    def _split(self, limit: int | None) -> list[bytes]:
        frames: list[bytes] = []
        start = 0
        while len(self._incoming) - start >= _HEADER_BYTES and len(frames) != limit:
            body = start + _HEADER_BYTES
            end = body + int.from_bytes(self._incoming[start:body], "little")
            if end > len(self._incoming):
                break
            frames.append(bytes(self._incoming[body:end]))
            start = end
        del self._incoming[:start]
        return frames


class CoordinatorQueue:
    """The coordinator's end: takes commands, sends output. Owned by one thread, but for `interrupt`."""

    def __init__(self, stream: FrameStream) -> None:
        self._stream = stream
        self._alarm, self._bell = socket.socketpair()
        self._bell.setblocking(False)

    def fileno(self) -> int:
        return self._stream.fileno()

    def poll(self, timeout_s: float = 0.0) -> list[EngineCommands]:
        """What has arrived, after waiting at most `timeout_s` for the first.

        Raises `IngressError` if the ingress died.
        """
        try:
            self._stream.flush()
            frames = self._stream.read()
            if not frames and timeout_s > 0:
                self._stream.wait(timeout_s, self._alarm)
                self._hush()
                self._stream.flush()
                frames = self._stream.read()
            return [queues.decode_commands(frame) for frame in frames]
        except QueueClosed:
            raise _dead_ingress() from None

    def interrupt(self) -> None:
        """Let a `poll` that waits, or else the next one, return at once; from any thread."""
        with contextlib.suppress(OSError):  # it rings already, or nobody polls any more
            self._bell.send(b"!")

    def _hush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._alarm.recv(4096, socket.MSG_DONTWAIT)

    def send(self, output: EngineOutput) -> None:
        """Send without waiting. Raises `IngressError` if the ingress died or has long stopped reading."""
        try:
            self._stream.write(queues.encode(output))
        except QueueClosed:
            raise _dead_ingress() from None
        if self._stream.backlog_bytes > MAX_BACKLOG_BYTES:
            raise IngressError(f"the ingress process hangs: {MAX_BACKLOG_BYTES >> 20} MiB of output wait for it")

    def close(self, linger_s: float = 1.0) -> None:
        """Give the ingress `linger_s` to read the last output, then close."""
        deadline = time.monotonic() + linger_s
        with contextlib.suppress(QueueClosed):
            while self._stream.backlog_bytes and (left := deadline - time.monotonic()) > 0:
                self._stream.wait(left)
                self._stream.flush()
        self._alarm.close()
        self._bell.close()
        self._stream.close()


class IngressQueue:
    """The ingress's end; its poller waits on `fileno`. Methods raise `QueueClosed` when the coordinator is gone."""

    def __init__(self, stream: FrameStream) -> None:
        self._stream = stream

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def backlog_bytes(self) -> int:
        """Commands that the coordinator has not read; the ingress refuses work while this is large."""
        return self._stream.backlog_bytes

    def receive(self) -> list[EngineOutput]:
        """What has arrived; never waits."""
        return [queues.decode_output(frame) for frame in self._stream.read()]

    def send(self, commands: EngineCommands) -> None:
        """Send without waiting; what does not fit now goes out with later calls of `flush`."""
        self._stream.write(queues.encode(commands))

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


def queue_pair() -> tuple[CoordinatorQueue, IngressQueue]:
    """Both ends in one process, for tests; `ingress_process` gives one to the process it starts."""
    ours, theirs = socket.socketpair()
    return CoordinatorQueue(FrameStream(ours)), IngressQueue(FrameStream(theirs))


def _dead_ingress() -> IngressError:
    return IngressError("the ingress process has ended, so no client can reach this server; its last lines say why")
