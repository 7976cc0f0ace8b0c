"""What a batch run has done so far, and the summary of it at the end."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field
from typing import Any

from fastserve_hpc.core.engine import COUNTED
from fastserve_hpc.protocol import Usage
from fastserve_hpc.stats import summarise

MAX_SAMPLES = 2**16


class Samples:
    """Values of millions of requests: all of them or, where they are too many, evenly chosen ones."""

    def __init__(self) -> None:
        self._values = array("d")
        self._stride = 1
        self._count = 0

    def add(self, value: float) -> None:
        if self._count % self._stride == 0:
            if len(self._values) == MAX_SAMPLES:
                self._values = self._values[::2]
                self._stride *= 2
            self._values.append(value)
        self._count += 1

    def summary(self) -> dict[str, float | None]:
        return summarise(self._values)


@dataclass(slots=True)
class Counts:
    """Counters of one run, changed by its runner alone."""

    started: float = field(default_factory=time.monotonic)
    succeeded: int = 0
    failed: int = 0
    skipped: int = 0
    """Lines that the output held already."""
    failed_before: int = 0
    """Of `skipped`, those with an error record."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    in_flight: int = 0
    """Requests that are with the server."""
    server: dict[str, float] = field(default_factory=dict)
    """What the server has counted during the run, for all its clients (`EngineStatus.counted_since`)."""
    ttft_s: Samples = field(default_factory=Samples)
    latency_s: Samples = field(default_factory=Samples)

    @property
    def finished(self) -> int:
        return self.succeeded + self.failed + self.skipped

    @property
    def all_failed(self) -> int:
        """Error records in the output, of this and earlier runs."""
        return self.failed + self.failed_before

    @property
    def wall_s(self) -> float:
        return max(time.monotonic() - self.started, 1e-9)

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.wall_s

    @property
    def tokens_per_s(self) -> float:
        """Of the kind that the run is about: output tokens or, where lines are only scored, prompt tokens."""
        return (self.output_tokens or self.prompt_tokens) / self.wall_s

    def answered(self, usage: Usage, has_output: bool, ttft_s: float | None, latency_s: float) -> None:
        """Count a request that was answered."""
        self.succeeded += 1
        self.prompt_tokens += usage.prompt_tokens
        self.output_tokens += usage.completion_tokens * has_output
        self.latency_s.add(latency_s)
        if ttft_s is not None:
            self.ttft_s.add(ttft_s)

    def summary(self) -> dict[str, Any]:
        """What `batch --json` prints. Times of a request count from when it was sent."""
        return {
            "requests": self.succeeded + self.failed,
            "failed": self.failed,
            "failed_before": self.failed_before,
            "skipped": self.skipped,
            "wall_s": self.wall_s,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "output_tokens_per_s": self.output_tokens_per_s,
            **{name: self.server.get(name) for name in COUNTED},
            "ttft_s": self.ttft_s.summary(),
            "latency_s": self.latency_s.summary(),
        }
