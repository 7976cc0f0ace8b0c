"""The ingress process: clients on one side, the coordinator's queues on the other.

`python -m fastserve_hpc.server.ingress FD`, started by `ingress_process`; FD is its end of the
socket pair. One thread and one poller, so nothing in it may wait. It leaves when the coordinator
has ended, or is gone.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Literal

import msgspec
import zmq

from fastserve_hpc import endpoint
from fastserve_hpc.endpoint import CurveKeys, Endpoint, ServerProcess
from fastserve_hpc.errors import ConfigError, ModelError
from fastserve_hpc.models.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from fastserve_hpc.server import queues
from fastserve_hpc.server.auth import AllowList, make_keys
from fastserve_hpc.server.doors import Door, Peer, open_socket_file, open_tcp
from fastserve_hpc.server.endpoint import EndpointFile, publish
from fastserve_hpc.server.front_desk import FrontDesk
from fastserve_hpc.server.local_queue import FrameStream, IngressQueue, QueueClosed
from fastserve_hpc.server.outbox import Outbox
from fastserve_hpc.server.paths import RuntimeDir
from fastserve_hpc.server.probe import answers
from fastserve_hpc.server.queues import IngressRefused, IngressSettings, IngressStarted

MESSAGES_TURN_S = 0.005
"""Spent on clients' messages before the coordinator's output has its turn again."""
MAX_COMMAND_BACKLOG_BYTES = 64 * 2**20
"""Commands that the coordinator has not read; above it clients' messages wait in their sockets."""
_LAST_WORDS_S = 2.0
_SETTINGS_TIMEOUT_S = 60.0


class Sockets:
    """The doors and, with TCP, the list of who may enter. Opened before the endpoint file tells of them."""

    def __init__(self, directory: Path, tcp: bool, lease_s: float) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.doors = [Door(self._context, 0, lease_s)]
        self.addresses = [open_socket_file(self.doors[0], directory)]
        self.keys: CurveKeys | None = None
        self.allow_list: AllowList | None = None
        if tcp:
            self._open_tcp(lease_s)

    def _open_tcp(self, lease_s: float) -> None:
        self.keys, secret = make_keys()
        self.allow_list = AllowList(self._context, [self.keys.client_public])
        self.doors.append(Door(self._context, 1, lease_s))
        self.addresses += open_tcp(self.doors[1], self.keys, secret)

    def send(self, peer: Peer, frames: list[bytes]) -> None:
        """Raises `Blocked` or `Unreachable`."""
        self.doors[peer.door].send(peer.identity, frames)

    def close(self) -> None:
        """Also gives what was sent last the time to arrive."""
        for door in self.doors:
            door.close()
        if self.allow_list is not None:
            self.allow_list.close()
        self._context.term()


class Ingress:
    """The loop: polls, then hands messages on to the front desk and its commands to the coordinator."""

    def __init__(self, queue: IngressQueue, sockets: Sockets, desk: FrontDesk, outbox: Outbox) -> None:
        self._queue = queue
        self._sockets = sockets
        self._desk = desk
        self._outbox = outbox
        self._poller = zmq.Poller()
        if sockets.allow_list is not None:
            self._poller.register(sockets.allow_list.socket, zmq.POLLIN)

    def run(self) -> None:
        """Serve until the coordinator has ended, then tell the clients."""
        while not self._desk.has_ended:
            self._wait()
            try:
                self._turn()
            except QueueClosed:
                self._desk.coordinator_died()
        self._say_last_words()

    def _wait(self) -> None:
        """Until there is something to do. While the coordinator does not read, clients have to wait."""
        backlog = self._queue.backlog_bytes
        self._poller.register(self._queue.fileno(), zmq.POLLIN | (zmq.POLLOUT if backlog else 0))
        for door in self._sockets.doors:
            self._poller.register(door.socket, zmq.POLLIN if self._takes_messages else 0)
        deadline = self._desk.next_deadline()
        self._poller.poll(None if deadline is None else max(0, int((deadline - time.monotonic()) * 1000) + 1))

    @property
    def _takes_messages(self) -> bool:
        return self._queue.backlog_bytes < MAX_COMMAND_BACKLOG_BYTES

    def _turn(self) -> None:
        for output in self._queue.receive():
            self._desk.take_output(output)
        if self._sockets.allow_list is not None:
            self._sockets.allow_list.answer()
        if self._takes_messages:
            self._take_messages()
        self._outbox.retry()
        self._desk.keep_alive()
        self._desk.drop_gone()
        self._send_commands()

    def _take_messages(self) -> None:
        """From all doors in turn, until there are none or tokens have waited long enough."""
        deadline = time.monotonic() + MESSAGES_TURN_S
        doors = list(self._sockets.doors)
        while doors and time.monotonic() < deadline:
            for door in list(doors):
                if (received := door.receive()) is None:
                    doors.remove(door)
                else:
                    self._desk.take_message(*received)

    def _send_commands(self) -> None:
        self._queue.flush()
        commands = self._desk.take_commands()
        if commands is not None:
            self._queue.send(commands)

    def _say_last_words(self) -> None:
        """Clients that do not read get a moment; what is in the sockets goes out as they close."""
        deadline = time.monotonic() + _LAST_WORDS_S
        while self._outbox.retry_at() is not None and time.monotonic() < deadline:
            time.sleep(0.02)
            self._outbox.retry()


def main() -> None:
    """The process, from the inherited socket to the end."""
    # A signal to the process group or the job is the coordinator's to act on; it tells us when to leave.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    # Each client is a file descriptor; the usual soft limit of 1024 is no protection here.
    hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    stream = FrameStream(socket.socket(fileno=int(sys.argv[1])))
    try:
        settings = queues.decode_settings(stream.read_one(_SETTINGS_TIMEOUT_S))
        with _ingress(settings, stream) as ingress:
            ingress.run()
    except (ConfigError, ModelError) as error:
        kind: Literal["ConfigError", "ModelError"] = "ModelError" if isinstance(error, ModelError) else "ConfigError"
        with suppress(QueueClosed):
            stream.write(queues.encode(IngressRefused(kind, str(error))))
    except QueueClosed:
        pass  # the coordinator died before the start was over, and has said why


@contextmanager
def _ingress(settings: IngressSettings, stream: FrameStream) -> Iterator[Ingress]:
    """Everything that the loop needs, published when it works, and taken back in the opposite order."""
    with ExitStack() as stack:
        tokenizer = _tokenizer(settings)
        directory = stack.enter_context(RuntimeDir(os.environ)).path
        sockets = stack.enter_context(closing(Sockets(directory, settings.tcp, settings.lease_s)))
        file = _publish(settings, sockets)
        stack.callback(file.take_back)
        outbox = Outbox(sockets.send)
        desk = FrontDesk(settings, tokenizer, file, outbox)
        stream.write(queues.encode(IngressStarted(file.endpoint)))
        yield Ingress(IngressQueue(stream), sockets, desk, outbox)


def _tokenizer(settings: IngressSettings) -> Tokenizer:
    return ByteTokenizer() if settings.model_path is None else load_tokenizer(Path(settings.model_path))


def _publish(settings: IngressSettings, sockets: Sockets) -> EndpointFile:
    described = Endpoint(
        name="",
        addresses=sockets.addresses,
        instance_id=uuid.uuid4().hex,
        state="starting",
        keys=sockets.keys,
        model=settings.model,
        max_model_len=settings.limits.max_model_len,
        job_id=os.environ.get("SLURM_JOB_ID"),
        cluster=os.environ.get("SLURM_CLUSTER_NAME"),
        process=ServerProcess.of(os.getppid()),
        started=time.time(),
    )
    directory = endpoint.endpoints_dir()
    try:
        return publish(
            directory,
            settings.endpoint,
            os.environ,
            lambda name: msgspec.structs.replace(described, name=name),
            answers,
        )
    except OSError as error:
        raise ConfigError(f"the endpoint file cannot be written to {directory}: {error.strerror}") from error


if __name__ == "__main__":
    main()
