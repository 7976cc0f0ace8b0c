"""The lines of the input: of one or several files, plain, gzip or zstd, or of standard input.

Lines end with LF or CRLF, the last one may lack its end; a byte order mark at the start of a file is dropped.
"""

from __future__ import annotations

import gzip
import io
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol, cast

from fastserve_hpc.batch.zstd import ZstdError, open_zstd
from fastserve_hpc.errors import ConfigError, FastServeError

MAX_LINE_BYTES = 16 * 2**20
"""As long as the longest message that a server takes. Of a longer line only this much and one byte is kept."""
STANDARD = "-"
"""Stands for standard input or output where a file is asked for."""

_BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_READ_ERRORS = (OSError, EOFError, zlib.error, ZstdError)


class Line(NamedTuple):
    """One line, its end included."""

    line_index: int
    """Counts from 1 over all input files, blank lines too: a line's identity."""
    number: int
    """Counts from 1 in its file."""
    file: str | None
    """Where there is more than one."""
    raw: bytes

    @property
    def place(self) -> str:
        """For people, as in "line 7" or "b.jsonl line 7"."""
        return f"line {self.number}" if self.file is None else f"{self.file} line {self.number}"


class Digest(Protocol):
    """Takes all bytes of the input, over-long lines too; a last line without an end as if it had one."""

    def update(self, raw: bytes) -> None: ...


class Inputs:
    """The input files in order; may be read again and again."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Standard input is spooled to a temporary file first. Raises `ConfigError`."""
        if sum(str(path) == STANDARD for path in paths) > 1:
            raise ConfigError("--input - is given twice: standard input can be read only once")
        self._names = [str(path) for path in paths]
        self._open = [_opener(path) for path in paths]

    def lines(self, digest: Digest | None = None) -> Iterator[Line]:
        """All lines, blank ones too. Raises `ConfigError` where a file cannot be read to its end."""
        index = 0
        for name, open_file in zip(self._names, self._open, strict=True):
            file = None if len(self._names) == 1 else name
            try:
                with open_file() as stream:
                    for number, raw in enumerate(raw_lines(stream, name, digest), 1):
                        index += 1
                        yield Line(index, number, file, raw)
            except _READ_ERRORS as error:
                raise ConfigError(f"--input {name}: cannot be read to its end: {error or 'truncated'}") from None

    def state(self) -> list[tuple[int, int] | None]:
        """Size and time of change of each file: whether the input is still the one that was read."""
        return [_state(Path(name)) if name != STANDARD else None for name in self._names]


def raw_lines(stream: BinaryIO, name: str, digest: Digest | None = None) -> Iterator[bytes]:
    """The lines of one file; of a line over the limit its first bytes."""
    limit, is_first = MAX_LINE_BYTES + 1, True
    while raw := stream.readline(limit):
        if digest is not None:
            digest.update(raw)
        if not raw.endswith(b"\n"):
            _skip_rest(stream, raw, digest)
        yield _first_line(raw, name) if is_first else raw
        is_first = False


def _first_line(raw: bytes, name: str) -> bytes:
    if raw.startswith(_UTF16):
        raise ConfigError(f"--input {name}: this is UTF-16 text; convert it: iconv -f UTF-16 -t UTF-8")
    # An over-long line stays over-long.
    return raw.removeprefix(_BOM) if len(raw) <= MAX_LINE_BYTES else raw


def _skip_rest(stream: BinaryIO, raw: bytes, digest: Digest | None) -> None:
    """Read on to the end of the line."""
    while raw and not raw.endswith(b"\n"):
        raw = stream.readline(MAX_LINE_BYTES + 1)
        if digest is not None:
            digest.update(raw or b"\n")


def _opener(path: Path) -> Callable[[], BinaryIO]:
    if str(path) == STANDARD:
        return _spooled(sys.stdin.buffer)
    if path.suffix == ".gz":
        return lambda: cast(BinaryIO, gzip.open(path, "rb"))
    if path.suffix in (".zst", ".zstd"):
        return lambda: open_zstd(path)
    return lambda: path.open("rb", buffering=2**18)


def _spooled(source: BinaryIO) -> Callable[[], BinaryIO]:
    spool = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as what opens it
    try:
        shutil.copyfileobj(source, spool, 2**20)
        spool.flush()
    except OSError as error:
        raise FastServeError(
            f"standard input does not fit into {tempfile.gettempdir()}: {error.strerror}; "
            "set TMPDIR to a place with more room, or give a file"
        ) from error

    def reopen() -> BinaryIO:
        spool.seek(0)
        return io.open(os.dup(spool.fileno()), "rb")  # noqa: UP020  closing it leaves the spool open

    return reopen


def _state(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
