"""Notices that a rank has died, hangs or raised, says so in one line, and ends all ranks.

MPI does not: under some launchers the others wait for ever. A thread on every rank holds a connection to rank 0's.
A closed connection or silence means that the other side is lost; then every rank leaves by `os._exit`.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from fastserve_hpc.errors import ExitCode, FastServeError, RankError, StoppedError
from fastserve_hpc.parallel.topology import Topology
from fastserve_hpc.parallel.watchdog_join import Listener, Rendezvous, join
from fastserve_hpc.parallel.watchdog_wire import Frame, Kind, Link

_LONGEST_BEAT_S = 1.0
_ANSWER_S = 3.0
"""How long a rank that failed waits for rank 0 to print its words."""
_LAST_RESORT_S = 5
_GOODBYE_S = 1.0
_TELL_S = 0.5
_MAX_TRACEBACK = 16_000
_SECONDS = struct.Struct("!d")

OnAbort = Callable[[str], None]


def ignore(cause: str) -> None:
    """The `on_abort` of a rank that has nothing to tidy up."""


class Watchdog:
    """One rank's watchdog; made by `start`, ended by `close` when the rank ends as planned.

    `heartbeat_s`: a rank that is silent for so long counts as lost. `on_abort` is called with the cause, in the
    watchdog's thread, before the process ends: for what must not outlive it. It has a few seconds at most.
    """

    def __init__(self, topology: Topology, links: list[Link], heartbeat_s: float, on_abort: OnAbort = ignore) -> None:
        self._rank = topology.rank
        self._links = {link.rank: link for link in links}
        self._heartbeat_s = heartbeat_s
        self._beat_s = min(_LONGEST_BEAT_S, heartbeat_s / 4)
        self._on_abort = on_abort
        self._identity = f"rank {self._rank} (pid {os.getpid()} on {socket.gethostname()})"
        self._own_failure: tuple[str, int] | None = None
        self._failed_at: float | None = None
        self._is_closing = False
        self._allowance_s = heartbeat_s
        self._is_told = threading.Event()
        self._is_told.set()
        self._is_waking = False
        self._woken = threading.Event()
        self._ending = threading.Event()
        self._connected = threading.Event()
        self._wake, self._alarm = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._last_beat = self._last_turn = time.monotonic()

    @classmethod
    def start(
        cls,
        topology: Topology,
        meeting: Listener | Rendezvous,
        heartbeat_s: float,
        on_abort: OnAbort = ignore,
        start_s: float = 120.0,
    ) -> Watchdog:
        """Connect all ranks and watch; rank 0 brings the `Listener`, the others its `rendezvous`.

        Returns once all are connected; raises `RankError` if they are not within `start_s`.
        """
        if isinstance(meeting, Listener):
            links = meeting.gather(range(1, topology.world_size), start_s)
        else:
            links = [join(meeting, topology.rank, start_s)[0]]
        watchdog = cls(topology, links, heartbeat_s, on_abort)
        watchdog._begin(start_s)
        return watchdog

    def check(self) -> None:
        """Raise `RankError` once a rank is lost, so that waits end in the moments before the process does."""
        if self._ending.is_set():
            raise RankError("a rank is lost: all ranks are ending")

    def abort(self, cause: BaseException) -> NoReturn:
        """End all ranks because this one failed; rank 0 prints why: the traceback, or the message of our own errors."""
        code = int(cause.exit_code if isinstance(cause, FastServeError) else ExitCode.INTERNAL)
        happened = "ends" if isinstance(cause, StoppedError) else "failed"
        text = f"{self._identity} {happened}, all ranks end: {_describe(cause)}"
        if self._ending.is_set() or not self._thread.is_alive():
            time.sleep(_LAST_RESORT_S if self._ending.is_set() else 0)
            self._leave(text, code)
        self._own_failure = (text, code)
        self._alarm.send(b"!")
        self._thread.join(_ANSWER_S + _LAST_RESORT_S)
        self._leave(text, code)  # its thread has had no turn: better said twice than never

    def allow_silence(self, silence_s: float) -> None:
        """Tell the others that this rank may be silent for so long, until this is called again.

        For phases that may hold the interpreter lock, such as the loading of large libraries from a slow file system.
        That a rank ends is still noticed at once.
        """
        self._allowance_s = silence_s
        self._is_told.clear()
        self._alarm.send(b"!")
        self._is_told.wait(_TELL_S)

    def wake_others(self) -> None:
        """End the dozing of the ranks connected to this one: work is coming."""
        self._is_waking = True
        self._alarm.send(b"!")

    def doze(self, longest_s: float) -> bool:
        """Sleep until another rank wakes this one, at most `longest_s`; whether it was woken."""
        is_woken = self._woken.wait(longest_s)
        self._woken.clear()
        return is_woken

    def close(self) -> None:
        """Tell the others that this rank ends as planned, and stop watching."""
        self._is_closing = True
        with contextlib.suppress(OSError):
            self._alarm.send(b"!")
        self._thread.join(_GOODBYE_S + _LAST_RESORT_S)

    # Everything below runs in the watchdog's thread.

    def _begin(self, start_s: float) -> None:
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        for link in self._links.values():
            link.allowance_s = self._heartbeat_s
            self._selector.register(link, selectors.EVENT_READ, link)
            link.send(Kind.HELLO, self._identity.encode())
        self._thread.start()
        if self._rank != 0 and not self._connected.wait(start_s):
            raise RankError(f"rank 0's watchdog was not joined by all ranks within {start_s:g} s")

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._turn()
            self._say_goodbye()
        except BaseException:
            self._leave(f"the watchdog of {self._identity} failed: {traceback.format_exc()}", ExitCode.INTERNAL)

    def _turn(self) -> None:
        events = self._selector.select(max(self._last_beat + self._beat_s - time.monotonic(), 0))
        now = time.monotonic()
        self._forgive_if_stopped(now)
        for key, _ in events:
            if key.data is None:
                self._wake.recv(16)
            else:
                self._take(key.data)
        self._pass_on_failure(now)
        self._tell_allowance()
        self._pass_on_wake()
        self._beat(now)
        self._judge(now)

    def _forgive_if_stopped(self, now: float) -> None:
        # After a stop of this process (a suspended job) the silence of the others proves nothing.
        if now - self._last_turn > self._heartbeat_s / 2:
            for link in self._links.values():
                link.last_heard = now
        self._last_turn = now

    def _take(self, link: Link) -> None:
        for frame in link.receive():
            self._hear(link, frame)
        if not link.is_open:
            self._selector.unregister(link)
            link.close()
            del self._links[link.rank]
            if not link.said_bye:
                self._lost(link, "its connection closed, so it has ended or was killed")

    def _hear(self, link: Link, frame: Frame) -> None:
        if frame.kind is Kind.HELLO:
            link.identity = frame.payload.decode(errors="replace")
            self._connected.set()
        elif frame.kind is Kind.BYE:
            link.said_bye = True
        elif frame.kind is Kind.WAKE:
            self._woken.set()
        elif frame.kind is Kind.ALLOW:
            link.allowance_s = _SECONDS.unpack(frame.payload)[0]
        elif frame.kind is Kind.ABORT:
            code, text = frame.payload[0], frame.payload[1:].decode(errors="replace")
            self._leave(text, code, is_printed=self._rank != 0)

    def _pass_on_failure(self, now: float) -> None:
        if self._own_failure is None:
            return
        text, code = self._own_failure
        if self._rank == 0 or 0 not in self._links:
            self._leave(text, code)
        if self._failed_at is None:
            self._failed_at = now
            self._links[0].send(Kind.ABORT, bytes([code]) + text.encode(), _TELL_S)
        elif now - self._failed_at > _ANSWER_S:
            self._leave(text, code)

    def _tell_allowance(self) -> None:
        if not self._is_told.is_set():
            for link in self._links.values():
                link.send(Kind.ALLOW, _SECONDS.pack(self._allowance_s), _TELL_S)
            self._is_told.set()

    def _pass_on_wake(self) -> None:
        if self._is_waking:
            self._is_waking = False
            for link in self._links.values():
                link.send(Kind.WAKE)

    def _beat(self, now: float) -> None:
        if now - self._last_beat >= self._beat_s:
            self._last_beat = now
            for link in self._links.values():
                link.send(Kind.BEAT)

    def _judge(self, now: float) -> None:
        for link in list(self._links.values()):
            silent_s = now - link.last_heard
            if link.identity and not link.said_bye and silent_s > link.allowance_s - self._beat_s:
                self._lost(link, f"no sign of life for {silent_s:.1f} s, so it is stopped, hangs or is cut off")

    def _lost(self, link: Link, cause: str) -> None:
        if self._own_failure is not None and self._rank != 0:
            self._leave(*self._own_failure)
        name = link.identity or f"rank {link.rank}"
        seen_by = "" if self._rank == 0 else f" (seen by {self._identity})"
        self._leave(f"{name} is lost, all ranks end: {cause}{seen_by}", ExitCode.INTERNAL)

    def _leave(self, text: str, code: int, is_printed: bool = False) -> NoReturn:
        """The one way out: say why, tidy up, tell the others, end the process."""
        signal.alarm(_LAST_RESORT_S)  # ends the process should anything below hang
        self._ending.set()
        with contextlib.suppress(Exception):  # nothing must keep the process alive
            if not is_printed:
                os.write(2, f"fastserve-hpc: {text.rstrip()}\n".encode())
            self._on_abort(text)
        if self._rank == 0:
            for link in self._links.values():
                link.send(Kind.ABORT, bytes([code]) + text.encode(), _TELL_S)
        os._exit(code)

    def _say_goodbye(self) -> None:
        # Closing with unread beats would reset the connection and could take the goodbye with it: read to the end.
        deadline = time.monotonic() + _GOODBYE_S
        for link in self._links.values():
            link.send(Kind.BYE, patience_s=_TELL_S)
            link.end_sending()
        while self._links and (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if key.data is None:
                    self._wake.recv(16)
                    continue
                key.data.receive()
                if not key.data.is_open:
                    self._selector.unregister(key.data)
                    del self._links[key.data.rank]
        self._selector.close()


def _describe(cause: BaseException) -> str:
    if isinstance(cause, FastServeError):
        return str(cause)
    trace = "".join(traceback.format_exception(type(cause), cause, cause.__traceback__))
    return "\n" + trace[-_MAX_TRACEBACK:]
