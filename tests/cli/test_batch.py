from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from dataclasses import replace
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
    assert set(server.opened) == {("demo", None)}
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


@pytest.mark.parametrize("option", ["--output", "--errors"])
def test_an_input_is_never_overwritten(run: Run, files: tuple[str, ...], tmp_path: Path, option: str) -> None:
    before = Path(files[1]).read_bytes()
    (tmp_path / "link.jsonl").symlink_to(files[1])
    other = () if option == "--output" else files[2:]
    result = run("batch", "--endpoint", "demo", *files[:2], *other, option, str(tmp_path / "link.jsonl"), "--overwrite")
    assert result.exit_code == 2
    assert "is read by this run too" in result.stderr
    assert Path(files[1]).read_bytes() == before


def test_bad_lines_are_exit_3(run: Run, files: tuple[str, ...]) -> None:
    with open(files[1], "a") as lines:
        lines.write("{broken\n")
    result = run("batch", "--endpoint", "demo", *files)
    assert result.exit_code == 3
    (error,) = [record["error"] for record in output_of(files) if record["error"]]
    assert error["line"] == 4


def test_a_rerun_goes_on_and_other_settings_are_refused(run: Run, server: FakeServer, files: tuple[str, ...]) -> None:
    assert run("batch", "--endpoint", "demo", *files).exit_code == 0
    for flag in ([], ["--resume"]):
        again = run("batch", "--endpoint", "demo", *flag, *files)
        assert again.exit_code == 0, again.output
        assert "3 were there already" in again.stdout
    assert len(server.requests) == 3
    server.status = replace(server.status, model="other")
    refused = run("batch", "--endpoint", "demo", *files)
    assert refused.exit_code == 2
    assert "model was fake, now other" in refused.stderr
    assert "--overwrite" in refused.stderr
    for flag in ("--overwrite", "--force"):
        assert run("batch", "--endpoint", "demo", flag, *files).exit_code == 0
        assert len(output_of(files)) == 3
    assert len(server.requests) == 9
    assert run("batch", "--endpoint", "demo", "--resume", "--overwrite", *files).exit_code == 2


def test_a_lost_server_is_exit_75(run: Run, server: FakeServer, files: tuple[str, ...]) -> None:
    server.errors["prompt 2."] = [EndpointError("the server was lost")]
    result = run("batch", "--endpoint", "demo", "--in-flight", "1", "--reconnect-s", "0", *files)
    assert result.exit_code == 75
    assert "error: the server was lost; 2 of 3 lines are done; run the same command again" in result.stderr
    assert len(output_of(files)) == 2


def test_a_server_that_comes_back_is_waited_for(run: Run, server: FakeServer, files: tuple[str, ...]) -> None:
    server.errors["prompt 2."] = [EndpointError("the server was lost")]
    result = run("batch", "--endpoint", "demo", *files)
    assert result.exit_code == 0, result.output
    assert "the server was lost; waiting up to 60 s" in result.stderr
    assert len(output_of(files)) == 3


def test_standard_input_to_standard_output(run: Run, files: tuple[str, ...]) -> None:
    source = Path(files[1]).read_bytes()
    result = run("batch", "--endpoint", "demo", "--input", "-", "--output", "-", input=source)
    assert result.exit_code == 0, result.output
    assert sorted(json.loads(line)["custom_id"] for line in result.stdout.splitlines()) == [
        "line-1",
        "line-2",
        "line-3",
    ]
    assert "3 requests" in result.stderr


def test_shards_are_merged_in_the_order_of_the_input(run: Run, tmp_path: Path, files: tuple[str, ...]) -> None:
    parts = [str(tmp_path / f"part-{i}.jsonl") for i in range(2)]
    for i, part in enumerate(parts):
        done = run("batch", "--endpoint", "demo", *files[:2], "--output", part, "--shard", f"{i}/2")
        assert done.exit_code == 0, done.output
    merge = ("batch", *files, "--order", "input", "--merge", parts[1])
    missing = run(*merge)
    assert missing.exit_code == 75
    assert "2 lines are in none of the merged files; 1 of 3 lines are done" in missing.stderr
    merged = run(*merge, "--merge", parts[0])
    assert merged.exit_code == 0, merged.output
    assert "2 records merged, 0 of them errors, 1 were there already" in merged.stdout
    assert [record["custom_id"] for record in output_of(files)] == ["line-1", "line-2", "line-3"]
    assert run("batch", "--endpoint", "demo", *files, "--shard", "2/2").exit_code == 2
    assert run("batch", *files, "--merge", files[1]).exit_code == 2


def test_progress_for_programs(run: Run, files: tuple[str, ...]) -> None:
    lines = run("batch", "--endpoint", "demo", "--progress-json", *files).stderr.splitlines()
    last = json.loads(lines[-1])
    assert (last["event"], last["lines"], last["finished"], last["failed"]) == ("progress", 3, 3, 0)


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
    own = ("--model", "fake", "--pp", "2", "--lease-s", "9")
    result = run("batch", *own, *files, "--resume", "--json", "--in-flight", "7", "--errors", files[3] + ".errors")
    assert result.exit_code == 3, result.output
    ((engine, server, arguments),) = calls
    assert (engine, server) == (EngineConfig(model="fake", pp=2), ServerConfig(lease_s=9.0))
    expected = [
        "batch",
        *files,
        "--errors",
        files[3] + ".errors",
        "--order",
        "finished",
        "--shard",
        "0/1",
        "--in-flight",
        "7",
    ]
    settings = {"dtype": "auto", "seed": "0", "max_model_len": "None"}
    expected += ["--json", "--reconnect-s", "0", *(w for s in settings.items() for w in ("--engine-setting", *s))]
    assert arguments == expected
