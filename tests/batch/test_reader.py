from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from fastserve_hpc.batch import lines as lines_module
from fastserve_hpc.batch import reader as reader_module
from fastserve_hpc.batch.lines import Inputs
from fastserve_hpc.batch.linesets import LineSet
from fastserve_hpc.batch.reader import BatchItem, BatchReader, LineError, read_batch
from fastserve_hpc.batch.survey import Shard, survey


def openai_line(custom_id: Any = "a", **changes: Any) -> dict[str, Any]:
    line = {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "Once", "max_tokens": 4},
    }
    return {name: value for name, value in {**line, **changes}.items() if value is not ...}


def joined(*lines: bytes | dict[str, Any]) -> bytes:
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    return b"".join(line + b"\n" for line in raw)


def read(*lines: bytes | dict[str, Any]) -> list[BatchItem | LineError]:
    return list(read_batch(io.BytesIO(joined(*lines))))


def read_files(*paths: Path, shard: Shard = Shard(), done: LineSet | None = None) -> list[BatchItem | LineError]:  # noqa: B008
    inputs = Inputs(paths)
    return list(BatchReader(inputs, shard, survey(inputs, shard), done or LineSet()))


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
        (b'{"prompt": "x", "temperature": 1e999}', "invalid_json", None),
        (b'{"prompt": "\xff"}', "invalid_json", None),
        (b'{"prompt": "\\ud800"}', "invalid_json", None),
        (b'{"prompt": ' + b"[" * 100_000, "invalid_json", None),
        (openai_line(...), "missing_custom_id", None),
        (openai_line(7), "missing_custom_id", None),
        (openai_line(url="/v1/embeddings"), "invalid_url", "a"),
        (openai_line(url=["/v1/completions"]), "invalid_url", "a"),
        (openai_line(method="GET"), "invalid_request", "a"),
        (openai_line(body="x"), "invalid_request", "a"),
        (openai_line(body={"prompt": "x", "stream": True}), "invalid_request", "a"),
        (openai_line(body={"prompt": "x", "top_p": -1}), "invalid_request", "a"),
        (openai_line(body={"prompt": "x", "seed": 2**200}), "invalid_request", "a"),
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


def test_of_equal_custom_ids_the_first_counts_and_both_lines_are_named(tmp_path: Path) -> None:
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_bytes(joined(openai_line("a"), {"prompt": "x"}, openai_line("b", url="?")))
    two.write_bytes(joined(openai_line("line-2"), openai_line("c"), openai_line("a"), openai_line("b")))
    items = read_files(one, two)
    errors = [item for item in items if isinstance(item, LineError)]
    assert [(e.index, e.line, e.code, e.custom_id) for e in errors] == [
        (3, 3, "invalid_url", "b"),
        (4, 1, "duplicate_custom_id", None),
        (6, 3, "duplicate_custom_id", None),
        (7, 4, "duplicate_custom_id", None),
    ]
    assert errors[2].message == f"{two} line 3: custom_id 'a' is on {one} line 1 already"
    # The same whatever is done already, and from whichever shard.
    done = LineSet()
    done.add(1)
    assert [e for e in read_files(one, two, done=done) if isinstance(e, LineError)] == errors
    shards = [read_files(one, two, shard=Shard(i, 3)) for i in range(3)]
    assert sorted((e for shard in shards for e in shard), key=lambda e: e.index) == items


def test_blank_lines_bom_crlf_and_a_missing_last_newline(tmp_path: Path) -> None:
    line = json.dumps(openai_line("a")).encode()
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + line + b"\r\n\r\n  \n" + line.replace(b'"a"', b'"b"'))
    assert [(item.line, item.custom_id) for item in read_files(path)] == [(1, "a"), (4, "b")]
    assert survey(Inputs([path]), Shard()).num_lines == 2


def test_an_empty_file_has_no_items(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"")
    assert read_files(tmp_path / "in") == []


def test_an_over_long_line_is_refused_and_the_next_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (lines_module, reader_module):
        monkeypatch.setattr(module, "MAX_LINE_BYTES", 200)
    long = openai_line("long", body={"prompt": "x" * 1000})
    exact = json.dumps(openai_line("exact")).encode().ljust(200)
    error, *items = read(b"\xef\xbb\xbf" + json.dumps(long).encode(), exact, openai_line("after"))
    assert isinstance(error, LineError)
    assert (error.line, error.code) == (1, "line_too_long")
    assert [item.custom_id for item in items] == ["exact", "after"]
