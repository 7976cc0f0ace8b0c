"""How a client finds a server, and what it is told when there is none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fastserve_hpc.endpoint import CurveKeys, Endpoint, ServerProcess, find
from fastserve_hpc.errors import EndpointError
from fastserve_hpc.slurm.queue import ActiveJobs

ALIVE = ServerProcess.of(os.getpid())
DEAD = msgspec.structs.replace(ALIVE, start_ticks=1)
KEYS = CurveKeys("s" * 40, "c" * 40, "x" * 40)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "endpoints").mkdir()
    return {"FASTSERVE_HPC_HOME": str(tmp_path)}


def write(environ: dict[str, str], name: str, **changes: Any) -> Path:
    values = {
        "addresses": [f"ipc:///run/{name}", f"tcp://node:1{len(name)}"],
        "process": ALIVE,
        "keys": KEYS,
        **changes,
    }
    path = Path(environ["FASTSERVE_HPC_HOME"]) / "endpoints" / f"{name}.json"
    path.write_bytes(msgspec.json.encode(Endpoint(name, **values)))
    return path


def test_by_name_path_address_and_job(environ: dict[str, str]) -> None:
    path = write(environ, "demo", job_id="4711")
    write(environ, "other", job_id="4712")
    for found in (
        find("demo", environ=environ),
        find(path, environ=environ),
        find(str(path), environ=environ),
        find(job="4711", environ=environ),
        find(job=4711, environ=environ),
    ):
        assert found.name == "demo"
    assert find("tcp://node:14", environ=environ).keys == KEYS
    assert find("tcp://node:14", environ=environ).addresses == ["tcp://node:14"]
    assert find("ipc:///any/socket", environ=environ) == Endpoint("ipc:///any/socket", ["ipc:///any/socket"])


def test_without_a_name(environ: dict[str, str]) -> None:
    write(environ, "demo")
    assert find(environ=environ).name == "demo"
    write(environ, "job-5", job_id="5")
    with pytest.raises(EndpointError, match="2 servers are running: name one with --endpoint: demo, job-5"):
        find(environ=environ)
    assert find(environ={**environ, "SLURM_JOB_ID": "5"}).name == "job-5"
    write(environ, "default")
    assert find(environ=environ).name == "default"
    assert find(environ={**environ, "FASTSERVE_HPC_ENDPOINT": "demo"}).name == "demo"
    assert find(environ={**environ, "FASTSERVE_HPC_ENDPOINT": ""}).name == find(environ=environ).name


@pytest.mark.parametrize(
    ("target", "job", "text"),
    [
        ("nobody", None, r"no endpoint named 'nobody' in .*endpoints; running are: demo"),
        ("/no/such.json", None, r"no file /no/such.json; running are: demo"),
        ("stale", None, r"the server of endpoint 'stale' \(pid \d+ on .*\) has ended; running are: demo"),
        ("torn", None, r"torn\.json is not an endpoint file .*remove it"),
        ("http://x", None, "must start with tcp:// or ipc://"),
        ("tcp://node:1", None, "TCP needs the keys"),
        (None, "99", "no server of job 99 in .*; running are: demo"),
        (None, "98", "the server of job 98 has ended; running are: demo"),
        (None, "7", "job 7 has 2 servers: name one"),
        ("demo", "7", "both endpoint 'demo' and job 7"),
    ],
)
def test_what_is_not_found_is_named_with_the_place_and_the_cure(
    environ: dict[str, str], target: str | None, job: str | None, text: str
) -> None:
    write(environ, "demo")
    write(environ, "stale", process=DEAD)
    write(environ, "ended", job_id="98", state="ended")
    write(environ, "seven", job_id="7")
    write(environ, "seven-2", job_id="7")
    (Path(environ["FASTSERVE_HPC_HOME"]) / "endpoints" / "torn.json").write_text("{")
    with pytest.raises(EndpointError, match=text):
        find(target, job=job, environ=environ)


def test_of_several_those_whose_job_is_over_do_not_count(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm is asked only where there is a choice, and believed only of its own cluster's jobs."""
    far = ServerProcess("n9", 1, "pid:[9]", 1)
    write(environ, "dead", job_id="1", cluster="here", process=far)
    assert find(environ=environ).name == "dead"
    monkeypatch.setattr("fastserve_hpc.endpoint.active_jobs", lambda: ActiveJobs("here", frozenset()))
    write(environ, "demo")
    assert find(environ=environ).name == "demo"
    write(environ, "far", job_id="1", cluster="elsewhere", process=far)
    with pytest.raises(EndpointError, match="demo, far"):
        find(environ=environ)


def test_a_job_that_has_not_started_is_no_mistake(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastserve_hpc.endpoint.active_jobs", lambda: ActiveJobs("here", frozenset({"7"})))
    with pytest.raises(EndpointError, match=r"job 7 has no server yet: it waits in the queue .*squeue --jobs=7"):
        find(job="7", environ=environ)
    with pytest.raises(EndpointError, match="no server of job 8"):
        find(job="8", environ=environ)


def test_with_nothing_running_the_cure_is_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(EndpointError, match="start one with 'fastserve-hpc serve'"):
        find(environ={"FASTSERVE_HPC_HOME": str(tmp_path)})


def test_from_another_host_a_socket_file_is_no_way_in() -> None:
    far = Endpoint("x", ["ipc:///a", "tcp://n:1"], process=msgspec.structs.replace(ALIVE, host="elsewhere"))
    assert far.reachable_addresses() == ["tcp://n:1"]
    assert not far.is_dead()
    assert msgspec.structs.replace(far, process=ALIVE).reachable_addresses() == ["ipc:///a", "tcp://n:1"]


def test_in_another_container_a_dead_pid_proves_nothing() -> None:
    assert DEAD.is_dead()
    assert not msgspec.structs.replace(DEAD, pid_namespace="pid:[1]").is_dead()
