"""What skip-join knows of a request."""

from __future__ import annotations

from dataclasses import dataclass

from fastserve_hpc.core.policy.sessions import Session
from fastserve_hpc.core.sequence import Sequence


@dataclass(slots=True, eq=False)
class Entry:
    """A sequence, and where it stands."""

    sequence: Sequence
    number: int
    """Counts arrivals."""
    arrived: float
    prompt_left: int
    """Prompt tokens that are not computed yet."""
    level: float = 0.0
    order: int = 0
    """Counts entries into queues."""
    place: float = 0.0
    """While it runs: the level that it is filed under."""
    end: int = 0
    """The outputs at which its level ends."""
    limit: int = 0
    """The outputs from which on progress is looked at."""
    is_running: bool = False
    is_prefilling: bool = False
    """While it runs: it is filed with those whose prompt is not done."""
    was_running: bool = False
    """It waits because another took its place."""
    is_hinted: bool = False
    """Its level comes from a hint that was trusted."""
    is_aged: bool = False
    aged_order: int = 0
    """Counts those that became aged."""
    is_pinned: bool = False
    session: Session | None = None
    stay: int = 0
    """Counts its moves into and out of the queue and the batch; what heaps hold from before is void."""
    wait_key: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
