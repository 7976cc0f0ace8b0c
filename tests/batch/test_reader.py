from __future__ import annotations

import io
import json
from typing import Any

import pytest

from fastserve_hpc.batch import reader
from fastserve_hpc.batch.reader import BatchItem, LineError, count_lines, read_batch


def openai_line(custom_id: Any = "a", **changes: Any) -> dict[str, Any]:
    line = {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "Once", "max_tokens": 4},
    }
    return {name: value for name, value in {**line, **changes}.items() if value is not ...}


def read(*lines: bytes | dict[str, Any], end: bytes = b"\n") -> list[BatchItem | LineError]:
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    return list(read_batch(io.BytesIO(end.join(raw) + end)))


def test_both_formats_and_both_kinds() -> None:
    messages = [{"role": "user", "content": "hi"}]
    items = read(
        openai_line("a"),
        openai_line("b", url="/v1/chat/completions", body={"messages": messages}),
        {"prompt": "x", "max_tokens": 3, "id": 5, "source": "set"},
        {"messages": messages, "custom_id": "mine"},
    )
    assert all(isinstance(item, BatchItem) for item in items)
    assert [(i.line, i.custom_id, i.ask.kind) for i in items if isinstance(i, BatchItem)] == [
        (1, "a", "completion"),
        (2, "b", "chat"),
        (3, "line-3", "completion"),
        (4, "mine", "chat"),
    ]
    plain = items[2]
    assert isinstance(plain, BatchItem)
    assert plain.extra == {"id": 5, "source": "set"}
    assert plain.ask.sampling.max_tokens == 3


@pytest.mark.parametrize(
    ("line", "code", "custom_id"),
    [
        (b'{"custom_id": "a"', "invalid_json", None),
        (b"[1]", "invalid_json", None),
        (b"\xff\xfe{}", "invalid_json", None),
        (b'{"prompt": "x", "temperature": NaN}', "invalid_json", None),
        (b'{"prompt": "\xff"}', "invalid_json", None),
        (openai_line(...), "missing_custom_id", None),
        (openai_line(7), "missing_custom_id", None),
        (openai_line(url="/v1/embeddings"), "invalid_url", "a"),
        (openai_line(url=["/v1/completions"]), "invalid_url", "a"),
        (openai_line(method="GET"), "invalid_request", "a"),
        (openai_line(body="x"), "invalid_request", "a"),
        (openai_line(body={"prompt": "x", "stream": True}), "invalid_request", "a"),
        (openai_line(body={"prompt": "x", "top_p": -1}), "invalid_request", "a"),
        ({"prompt": "x", "messages": []}, "invalid_request", None),
        ({"text": "x"}, "invalid_request", None),
    ],
)
def test_a_bad_line_is_an_error_that_names_it(line: Any, code: str, custom_id: str | None) -> None:
    good, bad, after = read(openai_line("first"), line, openai_line("last"))
    assert isinstance(good, BatchItem)
    assert isinstance(after, BatchItem)
    assert isinstance(bad, LineError)
    assert (bad.line, bad.code, bad.custom_id) == (2, code, custom_id)
    assert "line 2" in bad.message


def test_of_equal_custom_ids_the_first_counts_and_both_lines_are_named() -> None:
    first, second = read(openai_line("a"), openai_line("a"))
    assert isinstance(first, BatchItem)
    assert isinstance(second, LineError)
    assert second.code == "duplicate_custom_id"
    assert "line 2" in second.message
    assert "line 1" in second.message


def test_blank_lines_bom_crlf_and_a_missing_last_newline() -> None:
    line = json.dumps(openai_line("a")).encode()
    stream = b"\xef\xbb\xbf" + line + b"\r\n\r\n  \n" + line.replace(b'"a"', b'"b"')
    items = list(read_batch(io.BytesIO(stream)))
    assert [(item.line, item.custom_id) for item in items] == [(1, "a"), (4, "b")]
    assert count_lines(io.BytesIO(stream)) == 2


def test_an_empty_file_has_no_items() -> None:
    assert read(b"") == []


def test_an_over_long_line_is_refused_and_the_next_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_LINE_BYTES", 200)
    long = openai_line("long", body={"prompt": "x" * 1000})
    exact = json.dumps(openai_line("exact")).encode().ljust(200)
    error, *items = read(long, exact, openai_line("after"))
    assert isinstance(error, LineError)
    assert (error.line, error.code) == (1, "line_too_long")
    assert [item.custom_id for item in items] == ["exact", "after"]
