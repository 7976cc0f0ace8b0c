from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from fake_client import FakeServer

import fastserve_hpc
from fastserve_hpc.config import EngineConfig, ServerConfig
from fastserve_hpc.errors import EndpointError, ExitCode

Run = Callable[..., Result]


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, ...]:
    lines = [{"prompt": f"prompt {i}.", "max_tokens": 2} for i in range(3)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ("--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl"))


def output_of(files: tuple[str, ...]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(files[3]).read_text().splitlines()]


def test_a_file_runs_on_a_running_server(run: Run, server: FakeServer, files: tuple[str, ...]) -> None:
    result = run("batch", "--endpoint", "demo", *files)
    assert result.exit_code == 0, result.output
    assert server.opened == [("demo", None)]
    assert "3 requests" in result.stdout
    assert files[3] in result.stdout
    assert sorted(record["custom_id"] for record in output_of(files)) == ["line-1", "line-2", "line-3"]
    assert output_of(files)[0]["response"]["body"]["model"] == "fake"


def test_progress_of_a_log_is_plain_lines(run: Run, files: tuple[str, ...]) -> None:
    lines = run("batch", "--job", "7", *files).stderr.splitlines()
    assert lines[0] == "batch: 3 lines"
    assert lines[-1].startswith("batch: 3 of 3 lines, ")


def test_json_summary(run: Run, files: tuple[str, ...]) -> None:
    summary = json.loads(run("batch", "--endpoint", "demo", "--json", *files).stdout)
    assert (summary["requests"], summary["failed"], summary["output_tokens"]) == (3, 0, 6)
    assert summary["output"] == files[3]


def test_bad_lines_are_exit_3(run: Run, files: tuple[str, ...]) -> None:
    with open(files[1], "a") as lines:
        lines.write("{broken\n")
    result = run("batch", "--endpoint", "demo", *files)
    assert result.exit_code == 3
    (error,) = [record["error"] for record in output_of(files) if record["error"]]
    assert error["line"] == 4


def test_results_are_kept_unless_told_otherwise(run: Run, server: FakeServer, files: tuple[str, ...]) -> None:
    assert run("batch", "--endpoint", "demo", *files).exit_code == 0
    refused = run("batch", "--endpoint", "demo", *files)
    assert refused.exit_code == 2
    assert "--resume" in refused.stderr
    resumed = run("batch", "--endpoint", "demo", "--resume", *files)
    assert resumed.exit_code == 0
    assert "3 were there already" in resumed.stdout
    assert len(server.requests) == 3
    assert run("batch", "--endpoint", "demo", "--overwrite", *files).exit_code == 0
    assert len(server.requests) == 6
    assert len(output_of(files)) == 3


def test_a_lost_server_is_exit_75(run: Run, server: FakeServer, files: tuple[str, ...]) -> None:
    server.errors["prompt 2."] = [EndpointError("the server was lost")]
    result = run("batch", "--endpoint", "demo", "--in-flight", "1", *files)
    assert result.exit_code == 75
    assert "error: the server was lost; 2 of 3 lines are done" in result.stderr
    assert len(output_of(files)) == 2


def test_engine_options_have_no_place_on_a_running_server(run: Run, server: FakeServer, files: tuple[str, ...]) -> None:
    result = run("batch", "--endpoint", "demo", "--pp", "2", *files)
    assert result.exit_code == 2
    assert "--pp has no effect" in result.stderr
    assert server.opened == []
    assert run("batch", "--endpoint", "demo", *files, env={"FASTSERVE_HPC_PP": "2"}).exit_code == 0


def test_without_a_server_the_ranks_do_it(run: Run, monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...]) -> None:
    calls: list[Any] = []

    def run_batch(*args: Any) -> ExitCode:
        calls.append(args)
        return ExitCode.SOME_LINES_FAILED

    boot = types.SimpleNamespace(run_batch=run_batch)
    monkeypatch.setitem(sys.modules, "fastserve_hpc.boot", boot)  # type: ignore[arg-type]
    monkeypatch.setattr(fastserve_hpc, "boot", boot, raising=False)
    result = run("batch", "--pp", "2", "--lease-s", "9", *files, "--resume", "--json", "--in-flight", "7")
    assert result.exit_code == 3
    expected = [*files, "--in-flight", "7", "--resume", "--json"]
    assert calls == [(EngineConfig(pp=2), ServerConfig(lease_s=9.0), expected)]
