"""The control plane: plans go from the coordinator to every rank, reports come back.

This module knows no MPI: it holds the protocols, the encoding, and the control plane of a single rank.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import msgspec

from fastserve_hpc.core.plan import IterationPlan, RankReport
from fastserve_hpc.errors import RankError

_Message = TypeVar("_Message")


class Control(Protocol):
    """The coordinator's side. Only the main thread of rank 0 calls it."""

    def publish(self, plan: IterationPlan) -> None:
        """Start sending `plan` to every other rank; never waits. Rank 0 executes it by itself."""

    def collect(self) -> list[RankReport]:
        """The reports that have come from the other ranks, in order of arrival; never waits."""

    def close(self) -> None:
        """Wait until every plan has left."""


class WorkerControl(Protocol):
    """The side of every other rank. Only the main thread calls it."""

    def next_plan(self) -> IterationPlan | None:
        """The next plan in order, None while there is none; never waits."""

    def report(self, report: RankReport) -> None:
        """Start sending `report` to the coordinator; never waits."""

    def close(self) -> None:
        """Wait until every report has left."""


class LocalControl:
    """`Control` of a world of one rank, whose worker returns its reports directly."""

    def publish(self, plan: IterationPlan) -> None:
        """Nobody else to tell."""

    def collect(self) -> list[RankReport]:
        return []

    def close(self) -> None:
        """Nothing is under way."""


class PlanCodec:
    """Plans and reports as msgpack bytes. What cannot be decoded is fatal: the ranks are out of step."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._plans = msgspec.msgpack.Decoder(IterationPlan)
        self._reports = msgspec.msgpack.Decoder(RankReport)

    def encode(self, message: IterationPlan | RankReport) -> bytes:
        return self._encoder.encode(message)

    def decode_plan(self, data: bytes | bytearray) -> IterationPlan:
        return self._decode(self._plans, data, "a plan")

    def decode_report(self, data: bytes | bytearray) -> RankReport:
        return self._decode(self._reports, data, "a report")

    @staticmethod
    def _decode(decoder: msgspec.msgpack.Decoder[_Message], data: bytes | bytearray, what: str) -> _Message:
        try:
            return decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise RankError(
                f"{what} of {len(data)} bytes cannot be decoded ({error}): do all ranks run the same version?"
            ) from error
