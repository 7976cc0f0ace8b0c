"""What crosses the two local queues between the coordinator and the ingress process.

One message holds everything that has gathered since the last, so that an iteration costs one
send and one receive however many requests run.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from fastserve_hpc.core.engine import EngineState, EngineStatus
from fastserve_hpc.core.plan import TokenDelta
from fastserve_hpc.core.request import Request

DrainMode = Literal["finish", "now"]


class EngineCommands(msgspec.Struct, frozen=True, omit_defaults=True):
    """Ingress -> coordinator."""

    requests: list[Request] = []
    cancelled: list[int] = []
    wants_status: bool = False
    drain: DrainMode | None = None


class EngineOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """Coordinator -> ingress. `state` "ended" is the last message: the ingress then leaves."""

    deltas: list[TokenDelta] = []
    status: EngineStatus | None = None
    state: EngineState | None = None


encode = msgspec.msgpack.Encoder().encode
decode_commands = msgspec.msgpack.Decoder(EngineCommands).decode
decode_output = msgspec.msgpack.Decoder(EngineOutput).decode
