"""Sessions: what the requests of one client's conversation were given together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Session:
    """One that has live requests."""

    name: str
    num_live: int = 0
    tokens: int = 0
    """Output tokens of its requests since it had none."""


class Sessions:
    """Those that have live requests; what came before that is forgotten."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}

    def join(self, name: str) -> Session:
        """One more request of the session is here."""
        session = self._sessions.setdefault(name, Session(name))
        session.num_live += 1
        return session

    def leave(self, session: Session) -> None:
        """One of its requests has ended."""
        session.num_live -= 1
        if not session.num_live:
            del self._sessions[session.name]

    def check(self, num_live: int) -> None:
        """Assert that so many live requests are in sessions."""
        assert sum(session.num_live for session in self._sessions.values()) == num_live
