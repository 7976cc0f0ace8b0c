"""How watchdogs find each other at the start: rank 0 listens, the others join, strangers are turned away."""

from __future__ import annotations

import contextlib
import queue
import secrets
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

from fastserve_hpc.errors import RankError
from fastserve_hpc.parallel.addresses import LOOPBACK, local_addresses
from fastserve_hpc.parallel.watchdog_wire import HandshakeError, Link, admit_client, prove_to_server

_HANDSHAKE_S = 10.0
_MAX_HANDSHAKES = 128
_RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """How the other ranks find rank 0's watchdog and prove that they belong. It holds the secret: for MPI only."""

    addresses: tuple[str, ...]
    port: int
    secret: bytes


class Listener:
    """Rank 0's door, open until all ranks are in.

    With `one_host` it listens on the loopback address only.
    """

    def __init__(self, one_host: bool) -> None:
        self._socket = socket.create_server((LOOPBACK if one_host else "", 0), backlog=1024)
        addresses = [LOOPBACK] if one_host else local_addresses()
        self.rendezvous = Rendezvous(tuple(addresses), self._socket.getsockname()[1], secrets.token_bytes(32))
        self._admitted: queue.SimpleQueue[Link] = queue.SimpleQueue()
        self._handshakes = threading.BoundedSemaphore(_MAX_HANDSHAKES)

    def gather(self, ranks: Iterable[int], timeout_s: float) -> list[Link]:
        """The links of all of `ranks`, then close the door. Raises `RankError` naming those that did not come."""
        missing = set(ranks)
        links: dict[int, Link] = {}
        deadline = time.monotonic() + timeout_s
        with self._socket:
            while missing and time.monotonic() < deadline:
                self._open_door()
                for link in self._newcomers():
                    missing.discard(link.rank)
                    if link.rank in links:  # it gave up too early on the first connection
                        links[link.rank].close()
                    links[link.rank] = link
        if missing:
            raise RankError(f"the watchdogs of ranks {sorted(missing)} did not join within {timeout_s:g} s")
        return list(links.values())

    def _open_door(self) -> None:
        # One short-lived thread a caller: a slow stranger must not hold up the ranks behind it.
        self._socket.settimeout(0.02)
        with contextlib.suppress(TimeoutError):
            connection, _ = self._socket.accept()
            if self._handshakes.acquire(blocking=False):
                threading.Thread(target=self._admit, args=(connection,), daemon=True).start()
            else:
                connection.close()

    def _admit(self, connection: socket.socket) -> None:
        try:
            rank = admit_client(connection, self.rendezvous.secret, time.monotonic() + _HANDSHAKE_S)
            self._admitted.put(Link(connection, rank))
        except (HandshakeError, OSError):
            connection.close()
        finally:
            self._handshakes.release()

    def _newcomers(self) -> list[Link]:
        links = []
        with contextlib.suppress(queue.Empty):
            while True:
                links.append(self._admitted.get_nowait())
        return links


def join(rendezvous: Rendezvous, rank: int, timeout_s: float) -> tuple[Link, str]:
    """The link to rank 0, and the address that it answered on. Raises `RankError` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    problem: Exception | None = None
    while time.monotonic() < deadline:
        for address in rendezvous.addresses:
            try:
                return _join_at(address, rendezvous, rank, deadline), address
            except (HandshakeError, OSError) as error:
                problem = error
        time.sleep(_RETRY_S)
    raise RankError(
        f"rank {rank} cannot reach rank 0's watchdog at {', '.join(rendezvous.addresses)} port {rendezvous.port} "
        f"({problem}): does a firewall stand between the nodes?"
    )


def _join_at(address: str, rendezvous: Rendezvous, rank: int, deadline: float) -> Link:
    deadline = min(deadline, time.monotonic() + _HANDSHAKE_S)
    connection = socket.create_connection((address, rendezvous.port), timeout=_HANDSHAKE_S)
    try:
        prove_to_server(connection, rendezvous.secret, rank, deadline)
    except BaseException:
        connection.close()
        raise
    return Link(connection, 0)
