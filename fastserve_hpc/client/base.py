"""What both clients do alike: calls and their connection. Waiting is theirs."""

from __future__ import annotations

import os
import time
from typing import TypeVar

from fastserve_hpc import protocol
from fastserve_hpc.client.calls import Call, Calls
from fastserve_hpc.client.connection import Connection, connect
from fastserve_hpc.client.results import Event
from fastserve_hpc.endpoint import Endpoint, find
from fastserve_hpc.errors import EndpointError
from fastserve_hpc.protocol import Cancel, Delta, Submit, ToClient

Answer = TypeVar("Answer", bound=ToClient)


class ClientBase:
    """A lost connection ends the calls that are open with `EndpointError`; the next call connects anew."""

    def __init__(
        self,
        endpoint: str | os.PathLike[str] | None = None,
        *,
        job: str | int | None = None,
        connect_timeout_s: float = 10.0,
        silence_s: float = 30.0,
    ) -> None:
        """`endpoint` is a name, an endpoint file or an address. Without it and without `job`: the server that
        $FASTSERVE_HPC_ENDPOINT names, this Slurm job's, the default one, or the only one there is.
        `silence_s`: a server that says nothing for so long counts as dead.

        Raises `EndpointError` if there is no such server.
        """
        self._target = endpoint
        self._job = job
        self._connect_timeout_s = connect_timeout_s
        self._silence_s = silence_s
        self._calls = Calls()
        self._connection: Connection | None = None
        self._last_word = time.monotonic()
        self.endpoint: Endpoint = find(endpoint, job=job)
        """The server, as last looked up."""

    def _open_connection(self) -> Connection:
        """May wait for `connect_timeout_s`."""
        self.endpoint = find(self._target, job=self._job)
        return connect(self.endpoint, self._connect_timeout_s)

    def _adopt(self, connection: Connection) -> None:
        self._connection = connection
        self._last_word = time.monotonic()

    def _release(self, connection: Connection) -> None:
        """The connection is about to be closed."""

    def _take_in(self) -> None:
        """Sort in what has come; never waits."""
        connection = self._connection
        if connection is None:
            return
        try:
            for frames in connection.receive():
                self._last_word = time.monotonic()
                self._calls.sort_in(frames)
        except EndpointError as error:
            self._lose(str(error))
            return
        if connection.was_lost:
            self._lose(f"the connection to the server at {connection.address} was lost: it has ended or was killed")

    def _lose(self, reason: str) -> None:
        """Give the connection up, and all calls on it."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._release(connection)
            connection.close(linger_s=0)
        self._calls.fail_all(EndpointError(reason))

    def _check_silence(self, since: float) -> None:
        """Give up a server that has said nothing for too long; `since` is when that began to matter."""
        silence_s = time.monotonic() - max(since, self._last_word)
        if self._connection is not None and silence_s > self._silence_s:
            self._lose(f"the server at {self._connection.address} has been silent for {silence_s:.0f} s")

    def _cancel(self, call: Call) -> None:
        """Tell the server, unless the call is over. Where it does not read, it will see the connection close."""
        if self._calls.close(call) and self._connection is not None:
            self._connection.send(protocol.encode(Cancel(call.id)))

    def _cancel_all(self) -> None:
        if self._connection is not None:
            for id in self._calls.open_ids:
                self._connection.send(protocol.encode(Cancel(id)))


def answer_as(answer: ToClient, kind: type[Answer]) -> Answer:
    """The answer if it is of the kind that was asked for. Raises `EndpointError`."""
    if not isinstance(answer, kind):
        raise EndpointError(f"the server answered with {type(answer).__name__} instead of {kind.__name__}")
    return answer


class StreamState:
    """Counts the choices of one request that are not finished."""

    def __init__(self, submit: Submit) -> None:
        n = submit.sampling.n
        self.num_choices = n if isinstance(n, int) and n > 0 else 1  # the server refuses anything else
        self.num_open = self.num_choices

    def take(self, answer: ToClient) -> Event:
        """Raises `EndpointError`."""
        delta = answer_as(answer, Delta)
        if delta.choice >= self.num_choices:
            raise EndpointError(f"the server sent choice {delta.choice} of {self.num_choices}")
        self.num_open -= delta.finish_reason is not None
        return Event.of(delta)
