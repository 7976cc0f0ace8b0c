from __future__ import annotations

import dataclasses
import json
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from batch_files import GENERATION, MANIFEST, SURVEY, indexes, item, open_output, records

from fastserve_hpc.batch import attached, journal, lock
from fastserve_hpc.batch.manifest import engine_settings, fingerprint
from fastserve_hpc.batch.output import Mode, Output, Place, sort_files
from fastserve_hpc.batch.reader import LineError
from fastserve_hpc.errors import ConfigError, FastServeError


def error(index: int) -> LineError:
    return LineError(index, None, "invalid_json", f"line {index}: not JSON")


def write(out: Path, *lines: int, errors: Path | None = None, failed: tuple[int, ...] = ()) -> None:
    with open_output(out, msgspec.structs.replace(MANIFEST, errors=errors and errors.name), errors) as output:
        for index in lines:
            if index in failed:
                output.write_error(error(index))
            else:
                output.write_result(item(index), GENERATION, "smol", created=7)


def test_result_and_error_lines(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with open_output(out) as output:
        output.write_result(item(1, "a"), GENERATION, "smol", created=7)
        output.write_error(LineError(9, None, "invalid_json", "b line 2: not JSON", "b", 2))
    result, failed = records(out)
    assert (result["id"], result["custom_id"], result["error"]) == ("batch_req_1", "a", None)
    assert result["response"]["status_code"] == 200
    assert result["response"]["body"]["choices"][0]["text"] == "Pâris"
    assert result["response"]["body"]["created"] == 7
    assert result["response"]["request_id"] == result["response"]["body"]["id"]
    assert failed == {
        "id": "batch_req_9",
        "custom_id": None,
        "response": None,
        "error": {"code": "invalid_json", "message": "b line 2: not JSON", "line": 2, "file": "b"},
    }


def test_lines_are_in_the_file_soon(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with open_output(out) as output:
        output.write_result(item(1), GENERATION, "smol", created=7)
        deadline = time.monotonic() + 20 * journal.WRITE_S + 2
        while not out.stat().st_size:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert indexes(out) == [1]


def test_a_rerun_keeps_what_is_whole_and_cuts_a_torn_line(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    write(out, 1, 3, 4, failed=(3,))
    whole = out.read_bytes()
    starts = [0, whole.index(b"\n") + 1, whole.rindex(b"\n", 0, -1) + 1, len(whole)]
    for length in {
        *range(0, len(whole), 37),
        *starts,
        *(start + 1 for start in starts[:-1]),
        *(s - 1 for s in starts[1:]),
    }:
        out.write_bytes(whole[:length])
        with open_output(out) as output:
            kept = sum(start <= length for start in starts) - 1
            assert [i in output.done.lines for i in (1, 3, 4)] == [kept > 0, kept > 1, kept > 2]
            assert (len(output.done.lines), output.done.num_failed) == (kept, kept > 1)
        assert out.read_bytes() == whole[: starts[kept]]


def test_junk_holes_and_repeated_lines_are_cut_out(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    write(out, 1, 2, 3)
    first, second, third = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(first + bytes(4096) + b"\n" + first + second + b'{"id": "x"}\n' + third[:9] + third)
    with open_output(out) as output:
        assert len(output.done.lines) == 2
    assert out.read_bytes() == first + second
    assert sorted(path.name for path in (tmp_path / "out.jsonl.batch").iterdir())[1:] == ["manifest.json"]


def test_errors_in_a_file_of_their_own_count_as_done_and_may_be_retried(tmp_path: Path) -> None:
    out, errors = tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    write(out, 1, 2, 3, errors=errors, failed=(2,))
    assert (indexes(out), indexes(errors)) == ([1, 3], [2])
    manifest = msgspec.structs.replace(MANIFEST, errors="errors.jsonl")
    with open_output(out, manifest, errors) as output:
        assert (len(output.done.lines), output.done.num_failed) == (3, 1)
    with open_output(out, manifest, errors, retry_failed=True) as output:
        assert (len(output.done.lines), output.done.num_failed) == (2, 0)
    assert errors.read_bytes() == b""
    with pytest.raises(ConfigError, match="errors was errors.jsonl, now None"):
        open_output(out)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"input_sha256": "other"}, "the input was another"),
        ({"model": "other"}, "model was smol, now other"),
        ({"shard": "0/2"}, "shard was 0/1, now 0/2"),
        ({"engine": {"dtype": "float32", "seed": "1"}}, "seed was 0, now 1"),
    ],
)
def test_other_settings_are_refused_unless_it_starts_anew(tmp_path: Path, changes: dict[str, str], named: str) -> None:
    out = tmp_path / "out.jsonl"
    with open_output(out, msgspec.structs.replace(MANIFEST, engine={"seed": "0"})) as output:
        output.write_error(error(1))
    now = msgspec.structs.replace(MANIFEST, **changes)
    before = out.read_bytes()
    with pytest.raises(ConfigError, match=named):
        open_output(out, now)
    assert out.read_bytes() == before
    with open_output(out, now, overwrite=True) as output:
        assert len(output.done.lines) == 0
    assert out.read_bytes() == b""
    open_output(out, now).__exit__(None, None, None)


def test_a_server_that_does_not_tell_its_settings_and_a_longer_input_are_no_differences(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    known = msgspec.structs.replace(MANIFEST, engine={"seed": "0"})
    with open_output(out, known) as output:
        output.write_error(error(1))
    open_output(out).__exit__(None, None, None)
    longer = msgspec.structs.replace(MANIFEST, input_sha256="longer", input_bytes=200)
    grown = dataclasses.replace(SURVEY, num_bytes=200, sha256="longer", sha256_at_mark="abc")
    Output.open(Place(out), longer, grown, mode=Mode()).__exit__(None, None, None)
    with pytest.raises(ConfigError, match="seed was 0, now 7"):
        Output.open(Place(out), msgspec.structs.replace(longer, engine={"seed": "7"}), grown, mode=Mode())


def test_results_of_nobody_knows_what_are_not_touched(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("precious")
    for _ in range(2):
        with pytest.raises(ConfigError, match="holds something, but .*manifest.json does not say of what"):
            open_output(out)
        assert out.read_text() == "precious"
    (tmp_path / "out.jsonl.batch" / "manifest.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        open_output(out)


def test_places_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        Place(tmp_path / "nowhere" / "out.jsonl").check()
    with pytest.raises(ConfigError, match="not a plain file"):
        Place(Path("/dev/full")).check()
    with pytest.raises(ConfigError, match="--output too"):
        Place(tmp_path / "out", tmp_path / "out").check()


def test_sorting_by_input_line(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    write(out, 5, 1, 900, 2, 3)
    sort_files(Place(out))
    assert indexes(out) == [1, 2, 3, 5, 900]
    before = out.stat().st_ino
    sort_files(Place(out))
    assert out.stat().st_ino == before, "a sorted file is left alone"


@pytest.fixture
def small_disk() -> Iterator[int]:
    """No file may grow beyond so many bytes; as good as a full disk."""
    limit = 100_000
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_is_said_and_whole_lines_stay(tmp_path: Path, small_disk: int) -> None:
    out = tmp_path / "out.jsonl"

    def fill() -> None:
        with open_output(out) as output:
            for index in range(1, 2000):
                output.write_result(item(index), GENERATION, "smol", created=7)

    with pytest.raises(FastServeError, match="File too large; what is written stays, run the same command again"):
        fill()
    assert small_disk - 1000 < out.stat().st_size <= small_disk
    assert indexes(out) == list(range(1, len(records(out)) + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    with open_output(out) as output:
        for index in range(1, 2000):
            if index not in output.done.lines:
                output.write_result(item(index), GENERATION, "smol", created=7)
    assert indexes(out) == list(range(1, 2000))


def test_a_directory_that_is_removed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "RENEW_S", 0.05)
    monkeypatch.setattr(journal, "SYNC_S", 0.05)
    out = tmp_path / "results" / "out.jsonl"
    out.parent.mkdir()

    def run() -> None:
        with open_output(out) as output:
            output.write_error(error(1))
            shutil.rmtree(out.parent)
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                output.write_error(error(2))
                time.sleep(0.01)

    with pytest.raises(FastServeError, match="is gone|was removed"):
        run()


def test_a_file_that_is_replaced_is_said(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"

    def run() -> None:
        with open_output(out) as output:
            out.unlink()
            output.write_error(error(1))

    with pytest.raises(FastServeError, match="removed or replaced"):
        run()


def test_a_fingerprint_tells_models_apart(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "weights").write_bytes(bytes(3 * 2**20))
    first = fingerprint(model)
    assert engine_settings(model, {"seed": 0}) == {"model files": first, "seed": "0"}
    (model / "weights").write_bytes(bytes(3 * 2**20 - 1) + b"1")
    assert fingerprint(model) != first
    assert json.dumps(engine_settings(None, {"dtype": "auto"})) == '{"dtype": "auto"}'


@pytest.mark.parametrize(("takes_s", "num_said"), [(0.0, 0), (0.3, 1)])
def test_a_slow_disk_is_said(takes_s: float, num_said: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached, "SLOW_DISK_S", 0.05)
    said: list[str] = []
    with attached.said_if_slow(said.append):
        time.sleep(takes_s)
    assert said == ["waiting for the disk to take the last results"] * num_said
