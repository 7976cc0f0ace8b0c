"""What crosses the two local queues between the coordinator and the ingress process.

First the settings one way, and how the start went the other; then commands and output. One
message holds everything that has gathered since the last, so that an iteration costs one send and
one receive however many requests run.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from fastserve_hpc.core.engine import EngineState, EngineStatus
from fastserve_hpc.core.plan import TokenDelta
from fastserve_hpc.core.request import ModelLimits, Request
from fastserve_hpc.endpoint import Endpoint

DrainMode = Literal["finish", "now"]


class IngressSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the ingress process is told at its start."""

    model: str
    """The name that requests go by."""
    model_path: str | None
    """Where the tokenizer is: a Hugging Face directory or a .gguf file; None for the byte tokenizer of the fake."""
    limits: ModelLimits
    endpoint: str | None
    tcp: bool
    max_pending: int
    lease_s: float
    seed: int
    world_size: int
    tp: int
    pp: int
    policy: str


class IngressStarted(msgspec.Struct, frozen=True, tag=True):
    """The ingress listens, and its endpoint file is written."""

    endpoint: Endpoint


class IngressRefused(msgspec.Struct, frozen=True, tag=True):
    """The ingress cannot start, for a reason that is the user's to cure."""

    error: Literal["ConfigError", "ModelError"]
    message: str


class EngineCommands(msgspec.Struct, frozen=True, omit_defaults=True):
    """Ingress -> coordinator."""

    requests: list[Request] = []
    cancelled: list[int] = []
    slowdowns: dict[int, float] = {}
    """By request: what those of class `batch` may cost interactive ones from now on."""
    wants_status: bool = False
    drain: DrainMode | None = None


class EngineOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """Coordinator -> ingress. `state` "ended" is the last message: the ingress then leaves."""

    deltas: list[TokenDelta] = []
    status: EngineStatus | None = None
    state: EngineState | None = None
    max_model_len: int | None = None
    """With "ready": what the KV cache leaves of the limit that the ingress was started with."""


encode = msgspec.msgpack.Encoder().encode
decode_commands = msgspec.msgpack.Decoder(EngineCommands).decode
decode_settings = msgspec.msgpack.Decoder(IngressSettings).decode
decode_start = msgspec.msgpack.Decoder(IngressStarted | IngressRefused).decode
decode_output = msgspec.msgpack.Decoder(EngineOutput).decode
