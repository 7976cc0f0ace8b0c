"""What the ingress does with each message of a client and of the coordinator. Knows no sockets."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import singledispatchmethod

from fastserve_hpc import protocol
from fastserve_hpc.core.engine import BlockUsage, EngineState, EngineStatus
from fastserve_hpc.core.plan import TokenDelta
from fastserve_hpc.core.request import MAX_CHOICES, Request
from fastserve_hpc.errors import RequestError
from fastserve_hpc.models.tokenizer import Tokenizer
from fastserve_hpc.protocol import (
    Cancel,
    Drain,
    Draining,
    Failed,
    Ping,
    ProtocolError,
    StatusQuery,
    StatusReply,
    Steer,
    Submit,
    ToServer,
    Welcome,
)
from fastserve_hpc.server.admission import Admission, check_slowdown
from fastserve_hpc.server.doors import Peer
from fastserve_hpc.server.endpoint import EndpointFile
from fastserve_hpc.server.outbox import Outbox
from fastserve_hpc.server.queues import DrainMode, EngineCommands, EngineOutput, IngressSettings
from fastserve_hpc.server.sessions import Outcome, Sessions

ALIVE_S = 1.0
"""Silence towards a client with open requests that is broken by `Alive`."""
MAX_STATUS_QUERIES = 1000


class FrontDesk:
    """Answers clients through the outbox, and gathers commands for the coordinator."""

    def __init__(
        self,
        settings: IngressSettings,
        tokenizer: Tokenizer,
        endpoint_file: EndpointFile,
        outbox: Outbox,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._endpoint_file = endpoint_file
        self._outbox = outbox
        self._clock = clock
        self._started = clock()
        self._admission = Admission(settings.model, tokenizer, settings.limits, settings.seed)
        self._sessions = Sessions(tokenizer)
        self._state: EngineState = "starting"
        self._status_queries: list[tuple[Peer, int]] = []
        self._requests: list[Request] = []
        self._cancelled: list[int] = []
        self._slowdowns: dict[int, float] = {}
        self._wants_status = False
        self._drain: DrainMode | None = None
        self._next_alive = clock() + ALIVE_S
        self._num_garbled = 0

    @property
    def has_ended(self) -> bool:
        """The coordinator has said its last word."""
        return self._state == "ended"

    def take_message(self, peer: Peer, frames: list[bytes]) -> None:
        """Act on a client's message, whatever it holds."""
        try:
            message = protocol.decode_to_server(frames)
        except ProtocolError as error:
            self._num_garbled += 1
            code = "protocol" if error.id == protocol.NO_ID else "invalid_request"
            self._outbox.post(peer, Failed(error.id, code, str(error)))
            return
        try:
            self._act(message, peer)
        except RequestError as error:
            self._outbox.post(peer, Failed(message.id, error.code, str(error)))
        except Exception as error:  # a bug costs one request, not the server
            traceback.print_exc(file=sys.stderr)
            self._outbox.post(peer, Failed(message.id, "internal", f"the server failed: {error!r}"))

    def take_output(self, output: EngineOutput) -> None:
        """Act on the coordinator's message."""
        for tokens in output.deltas:
            self._take_tokens(tokens)
        if output.status is not None:
            self._answer_status(output.status)
        if output.max_model_len is not None:
            self._limit_length(output.max_model_len)
        if output.state is not None:
            self._enter(output.state)

    def coordinator_died(self) -> None:
        """Tell everybody that no more will come."""
        self._tell_all("ended", "the server ended unexpectedly; its own output says why")
        self._state = "ended"

    def drop_gone(self) -> None:
        """Cancel what clients that are gone had asked for."""
        for peer in self._outbox.take_gone():
            self._cancelled += self._sessions.drop(peer)

    def keep_alive(self) -> None:
        """Break the silence towards clients that wait; who cannot be reached any more shows by that."""
        if self._clock() < self._next_alive:
            return
        self._next_alive = self._clock() + ALIVE_S
        spoken_to = self._outbox.take_sent_to()
        for peer in self._sessions.peers:
            if peer not in spoken_to:
                self._outbox.probe(peer)

    def next_deadline(self) -> float | None:
        """When `keep_alive` or the outbox's `retry` has something to do; None while nobody waits."""
        alive = self._next_alive if len(self._sessions) else None
        return min((t for t in (alive, self._outbox.retry_at()) if t is not None), default=None)

    def take_commands(self) -> EngineCommands | None:
        """What has gathered for the coordinator."""
        if not (self._requests or self._cancelled or self._slowdowns or self._wants_status or self._drain):
            return None
        commands = EngineCommands(self._requests, self._cancelled, self._slowdowns, self._wants_status, self._drain)
        self._requests, self._cancelled, self._slowdowns = [], [], {}
        self._wants_status, self._drain = False, None
        return commands

    @singledispatchmethod
    def _act(self, message: ToServer, peer: Peer) -> None:
        raise NotImplementedError(type(message))

    @_act.register
    def _(self, submit: Submit, peer: Peer) -> None:
        self._check_capacity(submit)
        self._sessions.check_new(peer, submit.id)
        requests = self._admission.admit(submit)
        self._sessions.open(peer, submit, requests)
        self._requests += requests

    @_act.register
    def _(self, steer: Steer, peer: Peer) -> None:
        check_slowdown(steer.slowdown)
        self._slowdowns |= dict.fromkeys(self._sessions.requests_of(peer), steer.slowdown)

    @_act.register
    def _(self, cancel: Cancel, peer: Peer) -> None:
        self._cancelled += self._sessions.cancel(peer, cancel.id)
        self._outbox.forget(peer, cancel.id)

    @_act.register
    def _(self, query: StatusQuery, peer: Peer) -> None:
        if len(self._status_queries) >= MAX_STATUS_QUERIES:
            raise RequestError(f"{MAX_STATUS_QUERIES} status queries wait already: try again later", code="busy")
        self._status_queries.append((peer, query.id))
        if self._state == "starting":
            self._answer_status(self._status_while_starting())
        else:
            self._wants_status = self._wants_status or len(self._status_queries) == 1

    @_act.register
    def _(self, drain: Drain, peer: Peer) -> None:
        self._drain = "now" if drain.now or self._drain == "now" else "finish"
        self._enter("draining")
        self._outbox.post(peer, Draining(drain.id))

    @_act.register
    def _(self, ping: Ping, peer: Peer) -> None:
        described = self._endpoint_file.endpoint
        welcome = Welcome(
            ping.id,
            described.instance_id or "",
            self._settings.model,
            self._admission.limits.max_model_len,
            self._settings.lease_s,
        )
        self._outbox.post(peer, welcome)

    def _check_capacity(self, submit: Submit) -> None:
        if self._state in ("draining", "ended"):
            raise RequestError("the server is draining and takes no more requests: use another one", code="draining")
        wanted, limit = min(max(submit.sampling.n, 1), MAX_CHOICES), self._settings.max_pending
        if len(self._sessions) + wanted > limit:
            raise RequestError(
                f"{len(self._sessions)} requests are open and {wanted} more would pass the limit of {limit}: "
                "try again later, or serve with a larger --max-pending",
                code="busy",
            )

    def _take_tokens(self, tokens: TokenDelta) -> None:
        outcome = self._sessions.take(tokens)
        if outcome is not None:
            self._carry_out(outcome)

    def _carry_out(self, outcome: Outcome) -> None:
        if outcome.message is not None:
            self._outbox.post(outcome.peer, outcome.message)
        self._cancelled += outcome.cancelled

    def _answer_status(self, status: EngineStatus) -> None:
        """Give it to all who wait for one, with what only the ingress knows."""
        status = replace(status, details={**status.details, **self._details()})
        for peer, id in self._status_queries:
            self._outbox.post(peer, StatusReply(id, status))
        self._status_queries.clear()

    def _details(self) -> dict[str, float]:
        return {
            "max_pending": self._settings.max_pending,
            "open_requests": len(self._sessions),
            "clients_with_requests": len(self._sessions.peers),
            "garbled_messages": self._num_garbled,
        }

    def _enter(self, state: EngineState) -> None:
        if self._state == "draining" and state == "ready":
            return  # said before the coordinator heard of the drain
        self._state = state
        if state == "ended":
            self._tell_all("ended", "the server has ended before this request was finished: send it to another one")
        else:
            self._endpoint_file.update(state=state)

    def _limit_length(self, max_model_len: int) -> None:
        self._admission.limits = replace(self._admission.limits, max_model_len=max_model_len)
        self._endpoint_file.update(max_model_len=max_model_len)

    def _tell_all(self, code: str, message: str) -> None:
        for outcome in self._sessions.fail_all(code, message):
            self._carry_out(outcome)
        for peer, id in self._status_queries:
            self._outbox.post(peer, Failed(id, code, message))
        self._status_queries.clear()

    def _status_while_starting(self) -> EngineStatus:
        """The coordinator cannot answer while it loads the model."""
        settings = self._settings
        return EngineStatus(
            state="starting",
            model=settings.model,
            max_model_len=self._admission.limits.max_model_len,
            world_size=settings.world_size,
            tp=settings.tp,
            pp=settings.pp,
            policy=settings.policy,
            running=0,
            waiting=len(self._sessions),
            device_blocks=BlockUsage(0, 0),
            host_blocks=BlockUsage(0, 0),
            preemptions=0,
            uptime_s=self._clock() - self._started,
            vocab_size=settings.limits.vocab_size,
        )
