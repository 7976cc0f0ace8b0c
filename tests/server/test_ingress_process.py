"""The ingress as a process: how it starts, what it leaves behind, when it leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from front_door import FrontDoor, settings, status, wait_until

from fastserve_hpc import protocol
from fastserve_hpc.client import Client
from fastserve_hpc.endpoint import Endpoint, endpoints_dir, find
from fastserve_hpc.errors import ConfigError, EndpointError, ModelError
from fastserve_hpc.server.ingress_process import IngressProcess
from fastserve_hpc.server.queues import EngineOutput


def test_the_end_tells_the_waiting_and_takes_the_files_back(home: Path) -> None:
    door = FrontDoor()
    with Client("test") as client:
        door.engine.running.clear()
        running = client.stream("ab", max_tokens=2)
        wait_until(lambda: len(door.engine.open) == 1)
        door.engine.send(EngineOutput(state="ended"))
        with pytest.raises(EndpointError, match="ended"):
            next(running)
    wait_until(lambda: not door.directory.exists())
    assert list((home / "endpoints").iterdir()) == []
    door.close()


def test_without_its_coordinator_it_says_so_and_leaves(home: Path) -> None:
    door = FrontDoor()
    with Client("test") as client:
        running = client.stream("ab", max_tokens=90_000)
        next(running)
        door.engine.stop()
        door.process.queue.close()
        with pytest.raises(EndpointError, match="ended unexpectedly"):
            list(running)
    door.process.close()
    assert not door.directory.exists()
    assert list((home / "endpoints").iterdir()) == []


def test_while_the_model_loads_status_is_answered_and_requests_wait() -> None:
    with FrontDoor(ready=False, world_size=4, tp=2, pp=2) as door, Client("test") as client:
        assert find("test").state == "starting"
        status_now = client.status()
        assert (status_now.state, status_now.world_size, status_now.tp) == ("starting", 4, 2)
        early = client.stream("ab", max_tokens=2)
        door.engine.send(EngineOutput(state="ready"))
        assert "".join(e.text for e in early) == "ab"
        wait_until(lambda: find("test").state == "ready")
        assert replace(client.status(), details={}) == status()


def test_it_is_no_rank_and_keeps_nothing_open_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    os.set_inheritable(write_end, True)
    for name, value in (
        ("PMI_FD", str(write_end)),
        ("PMIX_RANK", "0"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("PMI_RANK", "0"),
    ):
        monkeypatch.setenv(name, value)
    with FrontDoor() as door:
        process = Path(f"/proc/{door.process.pid}")
        names = {entry.split(b"=")[0].decode() for entry in (process / "environ").read_bytes().split(b"\0")}
        assert not [n for n in names if n.startswith(("PMI", "OMPI_", "HYDRA"))]
        pipe = os.readlink(f"/proc/self/fd/{write_end}")
        assert pipe not in [os.readlink(fd) for fd in (process / "fd").iterdir()]
        assert os.getsid(door.process.pid) == door.process.pid
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(door.process.pid, number)
        with Client("test") as client:
            assert client.generate("ab", max_tokens=2).text == "ab"
        maps = (process / "maps").read_text()
        assert "torch" not in maps
        assert "libmpi" not in maps
    os.close(read_end)
    os.close(write_end)


def test_idle_it_uses_no_cpu() -> None:
    with FrontDoor() as door, Client("test") as client:
        client.generate("ab", max_tokens=2)
        time.sleep(0.2)
        fields = [Path(f"/proc/{door.process.pid}/stat").read_text().rpartition(")")[2].split() for _ in range(1)]
        time.sleep(2.0)
        fields.append(Path(f"/proc/{door.process.pid}/stat").read_text().rpartition(")")[2].split())
    ticks = [int(f[11]) + int(f[12]) for f in fields]
    assert ticks[1] - ticks[0] <= 2


def test_what_the_user_can_cure_comes_back_as_the_error_it_is(tmp_path: Path) -> None:
    with FrontDoor():
        process = IngressProcess(settings())
        with process, pytest.raises(ConfigError, match="--endpoint test: a server of that name is running"):
            process.wait_started()
    process = IngressProcess(settings(model_path=str(tmp_path / "none.gguf")))
    with process, pytest.raises(ModelError, match=r"none\.gguf"):
        process.wait_started()


def test_two_servers_without_a_name_are_default_and_default_2() -> None:
    processes = [IngressProcess(settings(endpoint=None)) for _ in range(2)]
    names = {p.wait_started().name for p in processes}
    for process in processes:
        process.close()
    assert names == {"default", "default-2"}


def test_a_long_tmpdir_and_a_wide_umask_are_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    before = os.umask(0)
    try:
        with FrontDoor() as door, Client("test") as client:
            assert client.generate("ab", max_tokens=2).text == "ab"
            socket_file = door.directory / "clients"
            modes = [p.stat().st_mode & 0o777 for p in (endpoints_dir() / "test.json", door.directory, socket_file)]
            assert modes == [0o600, 0o700, 0o600]
            assert endpoints_dir().stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


def test_endpoint_file_of_a_killed_server_is_taken_over(home: Path) -> None:
    code = (
        "import time\nfrom front_door import settings\n"
        "from fastserve_hpc.server.ingress_process import IngressProcess\n"
        "p = IngressProcess(settings()); p.wait_started(); print(p.pid, flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=_with_tests())
    assert child.stdout is not None
    ingress = int(child.stdout.readline())
    os.kill(ingress, signal.SIGKILL)  # so that nobody takes the file back
    child.kill()
    child.communicate()
    left: Endpoint = protocol.msgspec.json.decode((home / "endpoints" / "test.json").read_bytes(), type=Endpoint)
    assert left.is_dead()
    with pytest.raises(EndpointError, match="has ended"):
        find("test")
    with FrontDoor() as door:
        assert find("test").instance_id == door.endpoint.instance_id != left.instance_id


def _with_tests() -> dict[str, str]:
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    return {**os.environ, "PYTHONPATH": path}
