"""What the doctor says."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

Level = Literal["ok", "warning", "error"]


class Finding(msgspec.Struct, frozen=True):
    """One thing looked at: where, what was found, and what to do about it."""

    level: Level
    """An error stops the start; a warning costs speed or may hurt later."""
    check: str
    """One word: world, versions, model, links, gpus, memory, limits, cores."""
    value: str
    cure: str = ""
    rank: int | None = None
    """None: all ranks."""
    host: str = ""
    is_own: bool = False
    """Rank 0 did not say it, so this rank must."""

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank} on {self.host}: "
        cure = f"; {self.cure}" if self.cure else ""
        return f"{self.check}: {where}{self.value}{cure}"


def ok(check: str, value: str) -> Finding:
    return Finding("ok", check, value)


def at_level(findings: Iterable[Finding], level: Level) -> list[Finding]:
    return [finding for finding in findings if finding.level == level]
