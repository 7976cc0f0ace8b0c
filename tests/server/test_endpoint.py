"""Claiming a name for a server."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from fastserve_hpc.endpoint import CurveKeys, Endpoint, ServerProcess, find, load
from fastserve_hpc.errors import ConfigError
from fastserve_hpc.server import endpoint as module
from fastserve_hpc.server.endpoint import EndpointFile, publish
from fastserve_hpc.server.probe import answers
from fastserve_hpc.slurm.queue import ActiveJobs


def described(name: str, instance_id: str = "a", process: ServerProcess | None = None) -> Endpoint:
    process = process or ServerProcess.of(os.getpid())
    return Endpoint(name, ["ipc:///nowhere/clients"], instance_id, "starting", process=process)


def no_answer(_: Endpoint) -> bool:
    return False


def claim(directory: Path, name: str | None = None, **changes: str) -> EndpointFile:
    return publish(directory, name, {}, lambda n: described(n, **changes), no_answer)


def test_the_file_of_a_job_stays_for_a_while_and_says_that_it_has_ended(tmp_path: Path) -> None:
    def of_a_job(name: str) -> Endpoint:
        return msgspec.structs.replace(described(name, "j"), job_id="7", keys=CurveKeys("s", "c", "x"))

    publish(tmp_path, "job-7", {}, of_a_job, no_answer).take_back()
    path = tmp_path / "job-7.json"
    ended = load(path)
    assert (ended.state, ended.addresses, ended.keys) == ("ended", [], None)
    claim(tmp_path, "other")
    assert path.exists()
    os.utime(path, (0, time.time() - module.REMEMBERED_S - 1))
    claim(tmp_path, "third")
    assert not path.exists()


def test_files_of_jobs_that_slurm_knows_no_more_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastserve_hpc.endpoint.active_jobs", lambda: ActiveJobs("here", frozenset({"2"})))
    far = ServerProcess("n9", 1, "pid:[9]", 1)
    for job_id, cluster in (("1", "here"), ("2", "here"), ("3", "elsewhere")):
        kept = msgspec.structs.replace(described(job_id, job_id, far), job_id=job_id, cluster=cluster)
        publish(tmp_path, job_id, {}, lambda _, kept=kept: kept, no_answer)  # type: ignore[misc]
    claim(tmp_path, "other")
    assert sorted(path.stem for path in tmp_path.glob("*.json")) == ["2", "3", "other"]


def dead_process() -> ServerProcess:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = ServerProcess.of(child.pid)
    assert not process.is_dead()
    child.kill()
    assert child.stdin is not None
    child.stdin.close()
    child.wait()
    return process


def test_published_updated_removed(tmp_path: Path) -> None:
    file = claim(tmp_path / "deep" / "endpoints", "demo")
    path = tmp_path / "deep" / "endpoints" / "demo.json"
    assert load(path).state == "starting"
    file.update(state="ready")
    file.update(max_model_len=7)
    assert (load(path).state, load(path).max_model_len) == ("ready", 7)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["demo.json"]
    file.take_back()
    assert list(path.parent.iterdir()) == []


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = claim(tmp_path, "demo")

    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    file.update(state="ready")  # said on standard error, and no more than that
    with pytest.raises(OSError, match="No space"):
        claim(tmp_path, "other")
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["demo.json"]
    file.update(max_model_len=7)  # the next one finds its way free
    assert load(tmp_path / "demo.json").max_model_len == 7


def test_default_names_move_on_and_names_asked_for_are_refused(tmp_path: Path) -> None:
    assert [claim(tmp_path).endpoint.name for _ in range(3)] == ["default", "default-2", "default-3"]
    with pytest.raises(ConfigError, match=r"--endpoint default-2: a server of that name is running.*remove /"):
        claim(tmp_path, "default-2")


def test_the_default_name_in_a_slurm_job(tmp_path: Path) -> None:
    file = publish(tmp_path, None, {"SLURM_JOB_ID": "4711"}, described, no_answer)
    assert file.endpoint.name == "job-4711"


def test_the_name_of_a_dead_server_is_free(tmp_path: Path) -> None:
    process = dead_process()
    EndpointFile(tmp_path / "demo.json", described("demo", "old", process))
    assert claim(tmp_path, "demo", instance_id="new").endpoint.instance_id == "new"


def test_what_killed_servers_of_this_host_left_is_swept(tmp_path: Path) -> None:
    process = dead_process()
    far = msgspec.structs.replace(process, host="elsewhere")
    EndpointFile(tmp_path / "job-1.json", described("job-1", "old", process))
    EndpointFile(tmp_path / "job-2.json", described("job-2", "far", far))
    claim(tmp_path, "demo")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["demo.json", "job-2.json"]


def test_a_later_process_with_the_same_pid_is_another_one(tmp_path: Path) -> None:
    mine = ServerProcess.of(os.getpid())
    EndpointFile(tmp_path / "demo.json", described("demo", "old", msgspec.structs.replace(mine, start_ticks=1)))
    assert claim(tmp_path, "demo", instance_id="new").endpoint.instance_id == "new"


def test_a_server_of_another_host_is_asked_whether_it_lives(tmp_path: Path) -> None:
    far = msgspec.structs.replace(ServerProcess.of(os.getpid()), host="elsewhere")
    EndpointFile(tmp_path / "demo.json", described("demo", "old", far))
    with pytest.raises(ConfigError, match="is running"):
        publish(tmp_path, "demo", {}, described, lambda _: True)
    assert claim(tmp_path, "demo", instance_id="new").endpoint.instance_id == "new"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"name": 1}'])
def test_a_torn_file_is_in_nobody_s_way(tmp_path: Path, content: str) -> None:
    (tmp_path / "demo.json").write_text(content)
    assert claim(tmp_path, "demo").endpoint.name == "demo"


def test_a_file_that_another_server_took_over_is_left_to_it(tmp_path: Path) -> None:
    first = EndpointFile(tmp_path / "demo.json", described("demo", "first"))
    EndpointFile(tmp_path / "demo.json", described("demo", "second"))
    first.take_back()
    assert load(tmp_path / "demo.json").instance_id == "second"


def test_many_at_once_over_a_stale_file_all_get_names_of_their_own(tmp_path: Path) -> None:
    EndpointFile(tmp_path / "default.json", described("default", "old", dead_process()))
    files: list[EndpointFile] = []
    threads = [threading.Thread(target=lambda i=i: files.append(claim(tmp_path, instance_id=str(i)))) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({f.endpoint.name for f in files}) == 8
    for file in files:
        assert load(tmp_path / f"{file.endpoint.name}.json").instance_id == file.endpoint.instance_id


def test_a_claim_left_by_the_dead_is_waited_for_and_then_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLAIM_TIMEOUT_S", 0.2)
    (tmp_path / "demo.claim").mkdir()
    started = time.monotonic()
    assert claim(tmp_path, "demo").endpoint.name == "demo"
    assert time.monotonic() - started >= 0.2
    assert [p.name for p in tmp_path.iterdir()] == ["demo.json"]


def test_a_full_disk_is_no_reason_to_die(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = claim(tmp_path / "d", "demo")
    (tmp_path / "d" / "demo.json").unlink()
    (tmp_path / "d").rmdir()
    file.update(state="ready")
    assert "could not be updated" in capsys.readouterr().err


def test_probe_of_a_dead_port_and_of_what_cannot_be_reached() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
    assert not answers(Endpoint("x", [address]), timeout_s=0.3)
    far = ServerProcess("elsewhere", 1, "", 0)
    assert answers(Endpoint("x", ["ipc:///nowhere"], process=far))


def test_found_again_by_clients(home: Path) -> None:
    file = claim(home / "endpoints")
    assert find() == find("default") == find(home / "endpoints" / "default.json") == file.endpoint
