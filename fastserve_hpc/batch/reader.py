"""Reads batch files: every line becomes a request or an error record, never an exception.

Two kinds of line may be mixed: the OpenAI batch format (custom_id, method, url, body), and plain
`{"prompt": ...}` or `{"messages": ...}` lines with sampling fields beside them; other fields of a
plain line are carried through to its result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import msgspec

from fastserve_hpc.errors import RequestError
from fastserve_hpc.openai.bodies import Ask, Kind, field_names, parse_body

URLS: dict[str, Kind] = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}
MAX_LINE_BYTES = 16 * 2**20
"""As long as the longest message that a server takes."""

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class BatchItem:
    """A line that can be run."""

    line: int
    """Counts from 1."""
    custom_id: str
    ask: Ask
    extra: dict[str, Any] = field(default_factory=dict)
    """Fields of a plain line that mean nothing to us, for its result."""


@dataclass(frozen=True, slots=True)
class LineError:
    """A line that cannot be run, or whose request failed."""

    line: int
    custom_id: str | None
    code: str
    message: str


def read_batch(stream: BinaryIO) -> Iterator[BatchItem | LineError]:
    """The requests of a batch file in order. Blank lines are skipped; of equal custom_ids the first counts."""
    first_lines: dict[str, int] = {}
    for number, raw in _numbered_lines(stream):
        item = parse_line(number, raw)
        if isinstance(item, BatchItem):
            first = first_lines.setdefault(item.custom_id, number)
            if first != number:
                message = f"line {number}: custom_id {item.custom_id!r} is on line {first} already"
                yield LineError(number, item.custom_id, "duplicate_custom_id", message)
                continue
        yield item


def count_lines(stream: BinaryIO) -> int:
    """How many items `read_batch` will give; the stream is at its end afterwards."""
    return sum(1 for _ in _numbered_lines(stream))


def _numbered_lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, numbered from 1; of a line over the limit, its first bytes and one more."""
    number = 0
    while raw := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if number == 1:
            raw = raw.removeprefix(_BOM)
        rest = raw
        while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = stream.readline(MAX_LINE_BYTES + 1)
        if raw.strip():
            yield number, raw


def parse_line(number: int, raw: bytes) -> BatchItem | LineError:
    """One line's request, or what is wrong with it."""
    if len(raw.rstrip(b"\r\n")) > MAX_LINE_BYTES:
        return LineError(number, None, "line_too_long", f"line {number}: longer than {MAX_LINE_BYTES // 2**20} MiB")
    try:
        fields = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return LineError(number, None, "invalid_json", f"line {number}: not JSON: {error}")
    if not isinstance(fields, dict):
        return LineError(number, None, "invalid_json", f"line {number}: not a JSON object")
    custom_id = fields.get("custom_id")
    known_id = custom_id if isinstance(custom_id, str) else None
    try:
        return _item(number, fields)
    except RequestError as error:
        return LineError(number, known_id, error.code, f"line {number}: {error}")


def _item(number: int, fields: dict[str, Any]) -> BatchItem:
    if "body" in fields or "url" in fields or "method" in fields:
        return _openai_item(number, fields)
    return _plain_item(number, fields)


def _openai_item(number: int, fields: dict[str, Any]) -> BatchItem:
    custom_id, url, body = fields.get("custom_id"), fields.get("url"), fields.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise RequestError("custom_id is missing: give each line a text of its own", code="missing_custom_id")
    if fields.get("method", "POST") != "POST":
        raise RequestError(f"method is {fields['method']!r}: it must be POST")
    if not isinstance(url, str) or url not in URLS:
        raise RequestError(f"url is {url!r}: it must be one of {', '.join(URLS)}", code="invalid_url")
    if not isinstance(body, dict):
        raise RequestError("body is missing or not an object")
    return BatchItem(number, custom_id, parse_body(URLS[url], body))


def _plain_item(number: int, fields: dict[str, Any]) -> BatchItem:
    if ("prompt" in fields) == ("messages" in fields):
        raise RequestError("a line holds either custom_id, method, url and body, or just one of prompt and messages")
    kind: Kind = "chat" if "messages" in fields else "completion"
    custom_id = fields.pop("custom_id", None)
    if custom_id is None:
        custom_id = f"line-{number}"
    if not isinstance(custom_id, str) or not custom_id:
        raise RequestError(f"custom_id is {custom_id!r}: it must be a text that is not empty", code="missing_custom_id")
    known = field_names(kind)
    extra = {name: value for name, value in fields.items() if name not in known}
    return BatchItem(number, custom_id, parse_body(kind, fields), extra)
