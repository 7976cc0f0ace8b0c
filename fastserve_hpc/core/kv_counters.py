"""What has become of KV since the start."""

from __future__ import annotations

from dataclasses import dataclass

from fastserve_hpc.core.sequence import Sequence


@dataclass(slots=True)
class KvCounters:
    """Changed by the KV manager alone."""

    prefix_tokens: int = 0
    """Prompt positions whose KV another request had computed."""
    recomputed_tokens: int = 0
    """Positions whose KV was given up and is computed again."""
    host_full: int = 0
    """Requests that were parked without a copy of all their blocks: the host had no room."""

    def admitted(self, sequence: Sequence, covered: int) -> None:
        """A sequence was admitted with the KV of so many positions."""
        if sequence.num_planned:
            self.recomputed_tokens += max(0, sequence.num_planned - covered)
        elif not sequence.num_preemptions:
            self.prefix_tokens += covered
