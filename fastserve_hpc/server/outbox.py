"""What is on its way to clients. A client that does not read holds up nobody: its deltas are merged until it does."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

from fastserve_hpc import protocol
from fastserve_hpc.core.plan import TokenLogprobs
from fastserve_hpc.protocol import Alive, Delta, ToClient
from fastserve_hpc.server.doors import Blocked, Peer, Unreachable

MAX_REPLIES = 10_000
"""Replies other than deltas that wait for one client; more are dropped, and who asked for them waits in vain: it sends
without end and reads nothing. Deltas do not count, so that a refusal is not lost behind many answers."""

MIN_PAUSE_S, MAX_PAUSE_S = 0.02, 0.5

Send = Callable[[Peer, list[bytes]], None]


class DeltaSum:
    """Deltas of one choice, merged into one."""

    def __init__(self, first: Delta) -> None:
        self._last = first
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs | None] = []
        self.add(first)

    def add(self, delta: Delta) -> None:
        self._last = delta
        self._texts.append(delta.text)
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs
        self._prompt_logprobs += delta.prompt_logprobs

    def merged(self) -> Delta:
        return Delta(
            id=self._last.id,
            choice=self._last.choice,
            text="".join(self._texts),
            token_ids=self._token_ids,
            finish_reason=self._last.finish_reason,
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
            usage=self._last.usage,
        )


class Backlog:
    """Messages that wait for one client, in order; its size is bounded by what its requests may generate."""

    def __init__(self, now: float) -> None:
        self._waiting: dict[Hashable, DeltaSum | ToClient] = {}
        self._num_replies = 0
        self._last_reply = 0
        self._pause_s = MIN_PAUSE_S
        self.retry_at = now + MIN_PAUSE_S

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, message: ToClient) -> None:
        """Take a message; a delta joins those of its choice."""
        if isinstance(message, Delta):
            key = (message.id, message.choice)
            waiting = self._waiting.get(key)
            if isinstance(waiting, DeltaSum):
                waiting.add(message)
            else:
                self._waiting[key] = DeltaSum(message)
        elif self._num_replies < MAX_REPLIES:
            self._num_replies += 1
            self._last_reply += 1
            self._waiting[self._last_reply] = message

    def first(self) -> ToClient:
        waiting = next(iter(self._waiting.values()))
        return waiting.merged() if isinstance(waiting, DeltaSum) else waiting

    def drop_first(self) -> None:
        """The first went out: the client reads again."""
        first = self._waiting.pop(next(iter(self._waiting)))
        self._num_replies -= not isinstance(first, DeltaSum)
        self._pause_s = MIN_PAUSE_S

    def pause(self, now: float) -> None:
        """It did not; merging and encoding cost, so try less often."""
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        self.retry_at = now + self._pause_s

    def drop_request(self, id: int) -> None:
        """Forget the deltas of a request that the client has cancelled."""
        for key in [k for k in self._waiting if isinstance(k, tuple) and k[0] == id]:
            del self._waiting[key]


class Outbox:
    """Sends now what can go now, keeps what cannot. `send` raises `Blocked` or `Unreachable`."""

    def __init__(self, send: Send, clock: Callable[[], float] = time.monotonic) -> None:
        self._send = send
        self._clock = clock
        self._backlogs: dict[Peer, Backlog] = {}
        self._gone: dict[Peer, None] = {}
        self._sent_to: set[Peer] = set()

    def retry_at(self) -> float | None:
        """When `retry` has something to do next."""
        return min((b.retry_at for b in self._backlogs.values()), default=None)

    def post(self, peer: Peer, message: ToClient) -> None:
        if peer not in self._backlogs:
            if self._goes_out(peer, message):
                return
            self._backlogs[peer] = Backlog(self._clock())
        self._backlogs[peer].add(message)

    def probe(self, peer: Peer) -> None:
        """Send a sign of life, unless messages wait for the client: their retries find out as much about it."""
        if peer not in self._backlogs:
            self.post(peer, Alive())

    def retry(self) -> None:
        """Send what waits to those who read again."""
        now = self._clock()
        for peer in [p for p, b in self._backlogs.items() if b.retry_at <= now]:
            backlog = self._backlogs[peer]
            while backlog and self._goes_out(peer, backlog.first()):
                backlog.drop_first()
            if backlog:
                backlog.pause(now)
            else:
                del self._backlogs[peer]

    def forget(self, peer: Peer, id: int) -> None:
        """Drop what waits of a cancelled request."""
        if peer in self._backlogs:
            self._backlogs[peer].drop_request(id)

    def take_gone(self) -> list[Peer]:
        """Clients found to be gone since the last call."""
        gone = list(self._gone)
        self._gone.clear()
        for peer in gone:
            self._backlogs.pop(peer, None)
        return gone

    def take_sent_to(self) -> set[Peer]:
        """Clients that something was sent to since the last call."""
        sent_to, self._sent_to = self._sent_to, set()
        return sent_to

    def _goes_out(self, peer: Peer, message: ToClient) -> bool:
        """False if the client does not read. To one that is gone everything goes out."""
        try:
            self._send(peer, protocol.encode(message))
        except Blocked:
            return False
        except Unreachable:
            self._gone[peer] = None
        else:
            self._sent_to.add(peer)
        return True
