"""The seam between front ends (ingress, batch runner) and what generates tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from fastserve_hpc.core.plan import TokenDelta
from fastserve_hpc.core.request import Request

COUNTED = ("preemptions", "prefix_tokens", "recomputed_tokens", "offloaded_bytes", "uploaded_bytes", "energy_j")
"""What `EngineStatus.counted_since` counts, where the engine does."""
EngineState = Literal["starting", "ready", "draining", "ended"]


@dataclass(frozen=True, slots=True)
class BlockUsage:
    """Blocks of one tier of the KV cache."""

    total: int
    used: int


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot of the engine, what `fastserve-hpc status --json` prints."""

    state: EngineState
    model: str
    max_model_len: int
    world_size: int
    tp: int
    pp: int
    policy: str
    running: int
    waiting: int
    device_blocks: BlockUsage
    host_blocks: BlockUsage
    preemptions: int
    uptime_s: float
    vocab_size: int = 0
    """0 while it is not known."""
    iterations: int = 0
    prompt_tokens: int = 0
    """Prompt tokens computed since the start."""
    output_tokens: int = 0
    details: dict[str, float] = field(default_factory=dict)
    """Further counters, by name."""

    def counted_since(self, then: EngineStatus) -> dict[str, float]:
        """What was counted between two snapshots, by name, for all clients; nothing where `then` is another engine's.

        Preemptions, tokens of prefixes and those computed again, bytes of KV moved, energy.
        """
        if self.uptime_s < then.uptime_s:
            return {}
        now = {"preemptions": float(self.preemptions), **self.details}
        before = {"preemptions": float(then.preemptions), **then.details}
        return {name: now[name] - before.get(name, 0.0) for name in COUNTED if name in now}


class Engine(Protocol):
    """Takes requests, streams tokens. Implemented by the coordinator and by its proxy in the ingress process."""

    def submit(self, request: Request) -> None:
        """Take a validated request; its tokens follow through `events`. Never blocks."""

    def cancel(self, request_id: int) -> None:
        """Stop a request, whatever its state; unknown and finished ids are ignored. No delta follows."""

    def events(self) -> list[TokenDelta]:
        """What has happened since the last call, in order per request. Never blocks."""
