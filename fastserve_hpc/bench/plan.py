"""What a benchmark is asked to send, and the requests that this makes for a server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fastserve_hpc.bench import trace as traces
from fastserve_hpc.bench.load import Run
from fastserve_hpc.bench.trace import Load
from fastserve_hpc.bench.workloads import Workload, named
from fastserve_hpc.core.engine import EngineStatus
from fastserve_hpc.errors import ConfigError

WARM_UP = [Load(0.0, 32, 8)] * 8
"""Sent before a named workload, so that no figure holds the first touch of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """A named workload or a trace, and what to change about it. Raises `ConfigError` for what excludes each other."""

    workload: str | None = None
    trace: Path | None = None
    requests: int | None = None
    rate: float | None = None
    offline: bool = False
    one_by_one: bool = False
    scale_lengths: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.workload is None) == (self.trace is None):
            raise ConfigError("say what to send: --workload w1, w2 or w3, or --trace FILE")
        if self.offline + self.one_by_one + (self.rate is not None) > 1:
            raise ConfigError("--offline sends all at once, --rate spreads it, --one-by-one waits: choose one")
        if self.workload in ("w1", "w3") and self.rate is not None:
            raise ConfigError(f"--rate: the requests of {self.workload} have no times; those of w2 and of traces have")

    def run(self, status: EngineStatus) -> tuple[Run, int]:
        """The requests for a server with this status, and how many of them had to be cut to its context."""
        chosen = self._workload()
        loads, cut = self._fitted(chosen.loads, status.max_model_len)
        warm_up = [] if self.workload is None else WARM_UP
        prompts = traces.make_prompts([*warm_up, *loads], status.vocab_size, self.seed)
        one_by_one = self.one_by_one or (chosen.one_by_one and not self.offline)
        return Run(loads, prompts[len(warm_up) :], one_by_one, list(zip(warm_up, prompts, strict=False))), cut

    def _workload(self) -> Workload:
        if self.workload is not None:
            return named(self.workload, self.requests, self.rate)
        assert self.trace is not None
        loads = traces.read_trace(self.trace, self.requests)
        return Workload("trace", loads if self.rate is None else traces.at_rate(loads, self.rate, self.seed))

    def _fitted(self, loads: list[Load], max_model_len: int) -> tuple[list[Load], int]:
        if self.scale_lengths is not None:
            loads = traces.scaled_lengths(loads, self.scale_lengths)
        if self.offline:
            loads = traces.all_at_once(loads)
        return traces.fitted(loads, max_model_len)
