from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastserve_hpc.batch.reader import BatchItem, LineError
from fastserve_hpc.batch.writer import ResultWriter, check_output
from fastserve_hpc.client.results import Choice, Generation
from fastserve_hpc.errors import ConfigError, FastServeError
from fastserve_hpc.openai.bodies import parse_body
from fastserve_hpc.protocol import Usage

GENERATION = Generation([Choice(0, "Pâris", [5], finish_reason="stop")], [], Usage(3, 1))


def item(line: int, custom_id: str, **extra: Any) -> BatchItem:
    return BatchItem(line, custom_id, parse_body("completion", {"prompt": "x"}), extra)


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_result_and_error_lines(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with ResultWriter(out, "new") as writer:
        writer.write_result(item(1, "a", source="set"), GENERATION, "smol", created=7)
        writer.write_error(LineError(2, None, "invalid_json", "line 2: not JSON"))
    result, error = records(out)
    assert result["id"] == "batch_req_1"
    assert (result["custom_id"], result["error"], result["extra"]) == ("a", None, {"source": "set"})
    assert result["response"]["status_code"] == 200
    assert result["response"]["body"]["choices"][0]["text"] == "Pâris"
    assert result["response"]["body"]["created"] == 7
    assert result["response"]["request_id"] == result["response"]["body"]["id"]
    assert error == {
        "id": "batch_req_2",
        "custom_id": None,
        "response": None,
        "error": {"code": "invalid_json", "message": "line 2: not JSON", "line": 2},
    }


def test_each_line_is_in_the_file_at_once(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with ResultWriter(out, "new") as writer:
        writer.write_result(item(1, "a"), GENERATION, "smol", created=7)
        assert [record["custom_id"] for record in records(out)] == ["a"]


def test_results_are_not_overwritten_by_accident(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text('{"custom_id": "precious"}\n')
    with pytest.raises(ConfigError, match="--resume"):
        ResultWriter(out, "new")
    assert "precious" in out.read_text()
    ResultWriter(out, "overwrite").__exit__(None, None, None)
    assert out.read_text() == ""


def test_resume_keeps_what_is_whole_and_cuts_a_torn_line(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with ResultWriter(out, "resume") as writer:
        writer.write_result(item(1, "a"), GENERATION, "smol", created=7)
        writer.write_error(LineError(3, "a", "duplicate_custom_id", "line 3"))
        writer.write_result(item(4, "torn"), GENERATION, "smol", created=7)
    out.write_bytes(out.read_bytes()[:-5])
    with ResultWriter(out, "resume") as writer:
        assert writer.has(item(1, "a"))
        assert writer.has(LineError(3, "a", "duplicate_custom_id", "line 3"))
        assert not writer.has(item(4, "torn"))
        assert not writer.has(LineError(2, "a", "duplicate_custom_id", "line 2"))
        writer.write_result(item(4, "torn"), GENERATION, "smol", created=7)
    assert [record["custom_id"] for record in records(out)] == ["a", "a", "torn"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        check_output(tmp_path / "nowhere" / "out.jsonl", "new")


def test_a_full_disk_is_said_with_the_cure() -> None:
    with ResultWriter(Path("/dev/full"), "overwrite") as writer, pytest.raises(FastServeError, match="--resume"):
        writer.write_error(LineError(1, None, "x", "y"))
