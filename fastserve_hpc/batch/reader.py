"""The second reading: every line becomes a request or an error record, never an exception.

Two kinds of line may be mixed: the OpenAI batch format (custom_id, method, url, body), and plain
`{"prompt": ...}` or `{"messages": ...}` lines with sampling fields beside them; other fields of a
plain line are carried through to its result. Those of `score` are `{"context": ..., "continuation": ...}`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal

import msgspec

from fastserve_hpc.batch.lines import MAX_LINE_BYTES, Inputs, Line, raw_lines
from fastserve_hpc.batch.linesets import LineSet
from fastserve_hpc.batch.survey import Shard, Survey, custom_id_of, default_id
from fastserve_hpc.errors import RequestError
from fastserve_hpc.openai.bodies import Ask, Kind, field_names, parse_body, parse_score

Task = Literal["batch", "score"]
"""What a line asks for: an answer, or the score of one that it brings."""
URLS: dict[str, Kind] = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}

_KINDS: tuple[Kind, ...] = ("chat", "completion", "score")
_KNOWN = {kind: field_names(kind) | {"custom_id"} for kind in _KINDS}


@dataclass(frozen=True, slots=True)
class BatchItem:
    """A line that can be run."""

    index: int
    """Counts from 1 over all input files."""
    custom_id: str
    ask: Ask
    extra: dict[str, Any] = field(default_factory=dict)
    """Fields of a plain line that mean nothing to us, for its result."""
    file: str | None = None
    """Where there is more than one."""
    number: int = 0
    """The line's number in its file, from 1; 0: the same as `index`."""

    @property
    def line(self) -> int:
        return self.number or self.index

    def error(self, code: str, message: str) -> LineError:
        """The record of what went wrong with it."""
        place = f"line {self.line}" if self.file is None else f"{self.file} line {self.line}"
        return LineError(self.index, self.custom_id, code, f"{place}: {message}", self.file, self.number)


@dataclass(frozen=True, slots=True)
class LineError:
    """A line that cannot be run, or whose request failed."""

    index: int
    custom_id: str | None
    code: str
    message: str
    file: str | None = None
    number: int = 0

    @property
    def line(self) -> int:
        return self.number or self.index


class BatchReader:
    """Iterates over the lines of a shard that are not done; of equal custom_ids the first line of all counts."""

    def __init__(self, inputs: Inputs, shard: Shard, found: Survey, done: LineSet, task: Task = "batch") -> None:
        self._inputs = inputs
        self._task = task
        self._shard = shard
        self._repeated = found.repeated
        self._done = done
        self._first_places: dict[str, str] = {}

    def __iter__(self) -> Iterator[BatchItem | LineError]:
        for line in self._inputs.lines():
            if line.raw.isspace() or not line.raw:
                continue
            first = self._first_place(line) if self._repeated else None
            if line.line_index in self._shard and line.line_index not in self._done:
                yield parse_line(line, self._task) if first is None else _duplicate(line, first)

    def _first_place(self, line: Line) -> str | None:
        """Where this line's custom_id has been used before, if it has."""
        custom_id = custom_id_of(line.raw, line.line_index)
        if custom_id is None or hash(custom_id) not in self._repeated:
            return None
        first = self._first_places.setdefault(custom_id, line.place)
        return None if first == line.place else f"custom_id {custom_id!r} is on {first} already"


def read_batch(stream: BinaryIO) -> Iterator[BatchItem | LineError]:
    """The lines of one open file that are not blank; repeated custom_ids are not looked for."""
    for number, raw in enumerate(raw_lines(stream, "input"), 1):
        if raw.strip():
            yield parse_line(Line(number, number, None, raw))


def parse_line(line: Line, task: Task = "batch") -> BatchItem | LineError:
    """One line's request, or what is wrong with it."""
    raw = line.raw
    if len(raw) > MAX_LINE_BYTES and len(raw.rstrip(b"\r\n")) > MAX_LINE_BYTES:
        return _error(line, None, "line_too_long", f"longer than {MAX_LINE_BYTES // 2**20} MiB")
    try:
        fields = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return _error(line, None, "invalid_json", f"not JSON: {error}")
    except RecursionError:
        return _error(line, None, "invalid_json", "nested too deeply")
    if not isinstance(fields, dict):
        return _error(line, None, "invalid_json", "not a JSON object")
    try:
        return _ITEM[task](line, fields)
    except RequestError as error:
        custom_id = fields.get("custom_id")
        return _error(line, custom_id if isinstance(custom_id, str) else None, error.code, str(error))
    except RecursionError:
        return _error(line, None, "invalid_json", "nested too deeply")


def _error(line: Line, custom_id: str | None, code: str, message: str) -> LineError:
    return LineError(line.line_index, custom_id, code, f"{line.place}: {message}", line.file, line.number)


def _duplicate(line: Line, message: str) -> LineError:
    """Without the id, which belongs to the first line's record."""
    return _error(line, None, "duplicate_custom_id", message)


def _item(line: Line, fields: dict[str, Any]) -> BatchItem:
    if "body" in fields or "url" in fields or "method" in fields:
        return _openai_item(line, fields)
    return _plain_item(line, fields)


def _openai_item(line: Line, fields: dict[str, Any]) -> BatchItem:
    custom_id, url, body = fields.get("custom_id"), fields.get("url"), fields.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise RequestError("custom_id is missing: give each line a text of its own", code="missing_custom_id")
    if fields.get("method", "POST") != "POST":
        raise RequestError(f"method is {fields['method']!r}: it must be POST")
    if not isinstance(url, str) or url not in URLS:
        raise RequestError(f"url is {url!r}: it must be one of {', '.join(URLS)}", code="invalid_url")
    if not isinstance(body, dict):
        raise RequestError("body is missing or not an object")
    return BatchItem(line.line_index, custom_id, parse_body(URLS[url], body), {}, line.file, line.number)


def _plain_item(line: Line, fields: dict[str, Any]) -> BatchItem:
    if ("prompt" in fields) == ("messages" in fields):
        cure = "; for a context and a continuation use fastserve-hpc score" if "continuation" in fields else ""
        raise RequestError(
            f"a line holds either custom_id, method, url and body, or just one of prompt and messages{cure}"
        )
    kind: Kind = "chat" if "messages" in fields else "completion"
    custom_id = _custom_id(line, fields)
    return BatchItem(line.line_index, custom_id, parse_body(kind, fields), _extra(kind, fields), line.file, line.number)


def _score_item(line: Line, fields: dict[str, Any]) -> BatchItem:
    for name in ("context", "continuation"):
        if name not in fields:
            is_other = not fields.keys().isdisjoint(("prompt", "messages", "body"))
            cure = "; for prompts use fastserve-hpc batch" if is_other else ""
            raise RequestError(f"{name} is missing: a line of score holds context and continuation{cure}")
    custom_id = _custom_id(line, fields)
    return BatchItem(line.line_index, custom_id, parse_score(fields), _extra("score", fields), line.file, line.number)


def _custom_id(line: Line, fields: dict[str, Any]) -> str:
    custom_id = fields.get("custom_id")
    if custom_id is None:
        custom_id = default_id(line.line_index)
    if not isinstance(custom_id, str) or not custom_id:
        raise RequestError(f"custom_id is {custom_id!r}: it must be a text that is not empty", code="missing_custom_id")
    return custom_id


def _extra(kind: Kind, fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in _KNOWN[kind]}


_ITEM: dict[Task, Callable[[Line, dict[str, Any]], BatchItem]] = {"batch": _item, "score": _score_item}
