"""Writes batch results: one OpenAI batch result line a request, in the order in which they finish."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal

import msgspec

from fastserve_hpc.batch.reader import BatchItem, LineError
from fastserve_hpc.client.results import Generation
from fastserve_hpc.errors import ConfigError, FastServeError
from fastserve_hpc.openai.responses import response_body

Mode = Literal["new", "overwrite", "resume"]


class _WrittenError(msgspec.Struct, frozen=True):
    line: int


class _Written(msgspec.Struct, frozen=True):
    """As much of a result line as tells which input line it belongs to."""

    custom_id: str | None = None
    error: _WrittenError | None = None


def check_output(path: Path, mode: Mode) -> None:
    """Raise `ConfigError` where results would be lost or cannot be written."""
    if mode == "new" and path.exists() and path.stat().st_size > 0:
        raise ConfigError(
            f"--output {path}: holds results already; --resume adds what is missing, --overwrite starts again"
        )
    if not path.parent.is_dir():
        raise ConfigError(f"--output {path}: the directory {path.parent} does not exist")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"--output {path}: no permission to write there")


class ResultWriter:
    """The output file of one run. Each line is handed to the system before the next; a context manager."""

    def __init__(self, path: Path, mode: Mode):
        check_output(path, mode)
        self._path = path
        self._done = _cut_to_whole_lines(path) if mode == "resume" else frozenset()
        self._file: BinaryIO = path.open("ab" if mode == "resume" else "wb", buffering=0)

    def __enter__(self) -> ResultWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def has(self, item: BatchItem | LineError) -> bool:
        """Whether an earlier run has written this line's result or error."""
        return item.line in self._done or (isinstance(item, BatchItem) and item.custom_id in self._done)

    def write_result(self, item: BatchItem, generation: Generation, model: str, created: int) -> None:
        """The line of a request that was answered."""
        request_id = f"{'chatcmpl' if item.ask.kind == 'chat' else 'cmpl'}-{item.line}"
        body = response_body(item.ask.kind, generation, model, request_id, created)
        response = {"status_code": 200, "request_id": request_id, "body": body}
        extra = {"extra": item.extra} if item.extra else {}
        self._write(item.line, item.custom_id, response=response, error=None, **extra)

    def write_error(self, failed: LineError) -> None:
        """The line of a request that was not."""
        error = {"code": failed.code, "message": failed.message, "line": failed.line}
        self._write(failed.line, failed.custom_id, response=None, error=error)

    def _write(self, line: int, custom_id: str | None, **fields: Any) -> None:
        record = {"id": f"batch_req_{line}", "custom_id": custom_id, **fields}
        try:
            self._file.write(msgspec.json.encode(record) + b"\n")
        except OSError as error:
            raise FastServeError(
                f"--output {self._path}: {error.strerror}; what is written stays, go on with --resume"
            ) from error


def _cut_to_whole_lines(path: Path) -> frozenset[str | int]:
    """What a file that may not exist holds; a torn last line is cut off.

    Results are known by custom_id, errors by line: two lines may have the same custom_id.
    """
    done: set[str | int] = set()
    if not path.exists():
        return frozenset()
    with path.open("rb+") as file:
        whole = 0
        for raw in file:
            if raw.endswith(b"\n"):
                whole += len(raw)
                done |= _key(raw)
        file.truncate(whole)
    return frozenset(done)


def _key(raw: bytes) -> set[str | int]:
    try:
        record = msgspec.json.decode(raw, type=_Written)
    except msgspec.MsgspecError:
        return set()
    if record.error is not None:
        return {record.error.line}
    return {record.custom_id} if record.custom_id is not None else set()
