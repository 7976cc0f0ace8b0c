"""Result files as they lie on disk: reading back which lines are done, repairing, sorting by input line.

Whatever a crash may leave is taken for what it is: a torn last line, a hole, blocks of zeros, a line twice. Only whole
records of lines that are not done yet are kept.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from fastserve_hpc.batch.linesets import LineSet
from fastserve_hpc.batch.manifest import sync_directory

ID_PREFIX = "batch_req_"


class Record(msgspec.Struct, frozen=True):
    """As much of a result line as tells which input line it belongs to."""

    id: str
    error: Any = None

    @property
    def index(self) -> int:
        """0 where it is none of ours."""
        number = self.id.removeprefix(ID_PREFIX)
        return int(number) if number.isdecimal() and len(number) < 20 else 0


_decode = msgspec.json.Decoder(Record).decode


@dataclass(slots=True)
class Done:
    """What result files hold."""

    lines: LineSet = field(default_factory=LineSet)
    num_failed: int = 0
    """Of `lines`, those with an error record."""


def read_record(raw: bytes) -> Record | None:
    """None for what is no whole record."""
    if not raw.endswith(b"\n"):
        return None
    try:
        record = _decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return record if record.index else None


def recover(path: Path, done: Done, scratch: Path, retry_failed: bool = False) -> None:
    """Add to `done` what a file holds that may not exist; what is no good in it is cut away, durably.

    With `retry_failed` error records are no good. Raises `OSError`.
    """
    if not path.exists():
        return
    with path.open("rb+") as file:
        whole, is_tail_only, kept = _examine(file, done, retry_failed)
        if is_tail_only:
            file.truncate(whole)
            file.flush()
            os.fsync(file.fileno())
            return
    rewrite(path, scratch, lambda: _ranges(path, kept))


def _examine(file: BinaryIO, done: Done, retry_failed: bool) -> tuple[int, bool, array[int]]:
    """Where the good beginning ends, whether all that is good lies in it, and where good lines start."""
    whole, position, is_tail_only, kept = 0, 0, True, array("q")
    for raw in file:
        record = read_record(raw)
        is_wanted = record is not None and not (retry_failed and record.error is not None)
        if record is not None and is_wanted and done.lines.add(record.index):
            done.num_failed += record.error is not None
            is_tail_only = is_tail_only and whole == position
            kept.append(position)
            if whole == position:
                whole += len(raw)
        position += len(raw)
    return whole, is_tail_only, kept


def _ranges(path: Path, starts: array[int]) -> Iterator[bytes]:
    """The lines that begin at these places, in this order."""
    with path.open("rb") as file:
        for start in starts:
            if file.tell() != start:
                file.seek(start)
            yield file.readline()


def sort_by_line(path: Path, scratch: Path) -> None:
    """Put the results in the order of the input, at once and durably. Raises `OSError`."""
    if not path.exists():
        return
    starts, is_sorted, position, last = array("q"), True, 0, 0
    with path.open("rb") as file:
        for raw in file:
            record = read_record(raw)
            index = record.index if record is not None else 0
            is_sorted, last = is_sorted and index > last, index
            if index >= len(starts):
                starts.extend([-1] * (max(2 * len(starts), index + 1, 1024) - len(starts)))
            starts[index] = position
            position += len(raw)
    if not is_sorted:
        rewrite(path, scratch, lambda: _ranges(path, array("q", (start for start in starts if start >= 0))))


def rewrite(path: Path, scratch: Path, lines: Callable[[], Iterator[bytes]]) -> None:
    """Replace a file's content at once: whoever is killed here leaves the old one. Raises `OSError`."""
    temporary = scratch / f"{path.name}.new"
    with temporary.open("wb", buffering=2**20) as file:
        file.writelines(lines())
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_directory(path.parent)
