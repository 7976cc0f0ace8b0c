"""Where a run's results go: a journal of results, perhaps one of errors, and what earlier runs have done."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import msgspec

from fastserve_hpc.batch import manifest as manifests
from fastserve_hpc.batch.journal import Journal, StandardOutput
from fastserve_hpc.batch.lines import STANDARD
from fastserve_hpc.batch.lock import OutputLock
from fastserve_hpc.batch.manifest import Manifest
from fastserve_hpc.batch.reader import BatchItem, LineError
from fastserve_hpc.batch.results import ID_PREFIX, Done, recover, sort_by_line
from fastserve_hpc.batch.survey import Survey
from fastserve_hpc.client.results import Generation, Score
from fastserve_hpc.errors import ConfigError, FastServeError
from fastserve_hpc.openai.responses import response_body

Say = Callable[[str], None]


class Sink(Protocol):
    """Takes lines; a journal or standard output."""

    def append(self, line: bytes) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Place:
    """The files of one output."""

    output: Path
    errors: Path | None = None

    @property
    def is_stdout(self) -> bool:
        return str(self.output) == STANDARD

    @property
    def state(self) -> Path:
        """The directory beside the output for its manifest and lock."""
        return self.output.with_name(f"{self.output.name}.batch")

    @property
    def manifest(self) -> Path:
        return self.state / "manifest.json"

    @property
    def files(self) -> list[tuple[str, Path]]:
        """(option, path) of those that are real files."""
        output = [] if self.is_stdout else [("--output", self.output)]
        return output + ([] if self.errors is None else [("--errors", self.errors)])

    def errors_name(self) -> str | None:
        """The errors file as the manifest calls it."""
        if self.errors is None:
            return None
        return os.path.relpath(self.errors.absolute(), self.output.absolute().parent)

    def check(self, read: Sequence[Path] = ()) -> None:
        """Raise `ConfigError` where nothing could be written, or where it would overwrite a file that is `read`."""
        if self.errors is not None and self.is_stdout:
            raise ConfigError("--errors needs an --output file: what goes to standard output cannot be gone on with")
        if self.errors is not None and self.errors.absolute() == self.output.absolute():
            raise ConfigError(f"--errors {self.errors} is --output too: leave --errors out to have both in one file")
        for option, path in self.files:
            if not path.parent.is_dir():
                raise ConfigError(f"{option} {path}: the directory {path.parent} does not exist")
            if path.exists() and not path.is_file():
                raise ConfigError(f"{option} {path}: this is not a plain file")
            if not os.access(path if path.exists() else path.parent, os.W_OK):
                raise ConfigError(f"{option} {path}: no permission to write there")
            if any(path.exists() and source.exists() and path.samefile(source) for source in read):
                raise ConfigError(f"{option} {path} is read by this run too: give the results a file of their own")


class Output:
    """One run's results; a context manager. `done` is what earlier runs have finished."""

    def __init__(self, results: Sink, errors: Sink | None = None, done: Done | None = None) -> None:
        self.done = done or Done()
        self._results = results
        self._errors = errors or results
        self._stack = ExitStack()

    @classmethod
    def open(cls, place: Place, now: Manifest, found: Survey, *, mode: Mode, say: Say = lambda _: None) -> Output:
        """Lock the files, check what they hold, repair them, and go on behind it.

        Raises `ConfigError` where another run writes, or the results are those of other settings.
        """
        if place.is_stdout:
            return cls(StandardOutput())
        with ExitStack() as stack:
            try:
                return cls._open(place, now, found, mode, say, stack)
            except OSError as error:
                raise FastServeError(f"--output {place.output}: {error}") from error

    @classmethod
    def _open(cls, place: Place, now: Manifest, found: Survey, mode: Mode, say: Say, stack: ExitStack) -> Output:
        place.state.mkdir(exist_ok=True)
        lock = OutputLock(place.state, place.output, say)
        lock.acquire()
        stack.callback(lock.release)
        done = _prepare(place, now, found, mode)
        journals = [Journal(path, option, lock.renew) for option, path in place.files]
        for journal in journals:
            stack.callback(journal.close)
        opened = cls(journals[0], journals[1] if len(journals) > 1 else None, done)
        opened._stack = stack.pop_all()
        return opened

    def __enter__(self) -> Output:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Write and sync everything, then let go of the lock."""
        try:
            self._stack.close()
        except (FastServeError, OSError):
            if not isinstance(error, FastServeError):  # else it is the consequence of that one
                raise

    def write_result(self, item: BatchItem, generation: Generation, model: str, created: int) -> None:
        """The line of a request that was answered."""
        if item.ask.kind == "score":
            self._results.append(_encode(_score_record(item, Score.of(generation))) + b"\n")
            return
        request_id = f"{'chatcmpl' if item.ask.kind == 'chat' else 'cmpl'}-{item.index}"
        body = response_body(item.ask, generation, model, request_id, created)
        record: dict[str, Any] = {
            "id": f"{ID_PREFIX}{item.index}",
            "custom_id": item.custom_id,
            "response": {"status_code": 200, "request_id": request_id, "body": body},
            "error": None,
        }
        if item.extra:
            record["extra"] = item.extra
        self._results.append(_encode(record) + b"\n")

    def write_error(self, failed: LineError) -> None:
        """The line of a request that was not."""
        error = {"code": failed.code, "message": failed.message, "line": failed.line}
        if failed.file is not None:
            error["file"] = failed.file
        record = {"id": f"{ID_PREFIX}{failed.index}", "custom_id": failed.custom_id, "response": None, "error": error}
        self._errors.append(_encode(record) + b"\n")

    def append_raw(self, line: bytes, is_error: bool) -> None:
        """A result line that another run has written."""
        (self._errors if is_error else self._results).append(line)

    def sync(self) -> None:
        """Write everything and end the journals; the lock stays."""
        for sink in {id(sink): sink for sink in (self._results, self._errors)}.values():
            sink.close()


def _score_record(item: BatchItem, score: Score) -> dict[str, Any]:
    record: dict[str, Any] = {
        "id": f"{ID_PREFIX}{item.index}",
        "custom_id": item.custom_id,
        "loglikelihood": score.loglikelihood,
        "is_greedy": score.is_greedy,
        "tokens": score.num_tokens,
    }
    if score.num_cut:
        record["context_tokens_cut"] = score.num_cut
    record["error"] = None
    if item.extra:
        record["extra"] = item.extra
    return record


@dataclass(frozen=True, slots=True)
class Mode:
    """How to take what an output holds already."""

    overwrite: bool = False
    retry_failed: bool = False


_encode = msgspec.json.Encoder().encode


def _prepare(place: Place, now: Manifest, found: Survey, mode: Mode) -> Done:
    """Make the files ready to be appended to, and say what they hold."""
    done = Done()
    if mode.overwrite:
        for _, path in place.files:
            path.write_bytes(b"")
    if any(path.exists() and path.stat().st_size for _, path in place.files):
        then = manifests.load(place.manifest, place.output)
        if then is None:
            raise ConfigError(
                f"--output {place.output}: holds something, but {place.manifest} does not say of what; "
                "write to another --output, or start again with --overwrite"
            )
        manifests.check_same(place.output, then, now, found)
        for _, path in place.files:
            recover(path, done, place.state, mode.retry_failed)
        now = msgspec.structs.replace(now, engine={**then.engine, **now.engine})
    manifests.save(place.manifest, now)
    return done


def sort_files(place: Place) -> None:
    """Put a finished output into the order of the input; the lock is held. Raises `FastServeError`."""
    try:
        for _, path in place.files:
            sort_by_line(path, place.state)
    except OSError as error:
        raise FastServeError(f"--order input: {error}; the results are whole, in another order") from error
