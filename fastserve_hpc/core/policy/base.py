"""The seam between the scheduler and what decides who runs first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from fastserve_hpc.core.sequence import Sequence

OrderKey = tuple[float, ...]


class Policy(Protocol):
    """Orders the sequences that are not finished. Knows nothing of memory, batches or ranks.

    The scheduler calls no other method while it iterates over `ranked`.
    """

    name: str

    def add(self, sequence: Sequence, now: float) -> None:
        """A request has arrived."""

    def remove(self, sequence: Sequence, is_complete: bool) -> None:
        """A sequence has left: with its whole answer, or because it was aborted or failed."""

    def on_progress(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        """A slice of so many positions is done; a token it sampled is in `sequence.outputs` already.

        Not called for the slice that finishes a sequence, nor after `remove`.
        """

    def ranked(self, now: float) -> Iterator[Sequence]:
        """All sequences, first to run first, each once.

        Lazy: the scheduler stops after about one batch, and only that much may be paid for,
        however long the queue is.
        """

    def counters(self) -> dict[str, float]:
        """What `status` shows of it, by name: what it has done, and how many stand where."""

    def order_key(self, sequence: Sequence) -> OrderKey:
        """Where the sequence stands in `ranked` now: ascending, no two alike. For choosing whom to preempt."""
