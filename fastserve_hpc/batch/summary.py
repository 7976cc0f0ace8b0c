"""What a batch run has done so far, and the summary of it at the end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from fastserve_hpc.protocol import Usage
from fastserve_hpc.stats import summarise


@dataclass(slots=True)
class Counts:
    """Counters of one run, changed by its runner alone."""

    started: float = field(default_factory=time.monotonic)
    succeeded: int = 0
    failed: int = 0
    skipped: int = 0
    """Lines that the output held already."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)

    @property
    def finished(self) -> int:
        return self.succeeded + self.failed + self.skipped

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / max(time.monotonic() - self.started, 1e-9)

    def answered(self, usage: Usage, ttft_s: float | None, latency_s: float) -> None:
        """Count a request that was answered."""
        self.succeeded += 1
        self.prompt_tokens += usage.prompt_tokens
        self.output_tokens += usage.completion_tokens
        self.latency_s.append(latency_s)
        if ttft_s is not None:
            self.ttft_s.append(ttft_s)

    def summary(self) -> dict[str, Any]:
        """What `batch --json` prints. Times of a request count from when it was sent."""
        return {
            "requests": self.succeeded + self.failed,
            "failed": self.failed,
            "skipped": self.skipped,
            "wall_s": time.monotonic() - self.started,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "output_tokens_per_s": self.output_tokens_per_s,
            "ttft_s": summarise(self.ttft_s),
            "latency_s": summarise(self.latency_s),
        }
