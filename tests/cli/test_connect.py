"""`fastserve-hpc connect`: what it prints, and the file that goes with it."""

from __future__ import annotations

import re
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from click.testing import Result

from fastserve_hpc.endpoint import CurveKeys, Endpoint, load, write

Run = Callable[..., Result]
KEYS = CurveKeys("s" * 40, "c" * 40, "x" * 40)
SERVER = Endpoint("job-7", ["ipc:///run/a", "tcp://n1:4711", "tcp://10.0.0.1:4711"], "abc", keys=KEYS, job_id="7")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FASTSERVE_HPC_HOME", str(tmp_path))
    (tmp_path / "endpoints").mkdir()
    write(tmp_path / "endpoints" / "job-7.json", SERVER)
    return tmp_path


@pytest.mark.parametrize("told", [["7"], ["--job", "7"], ["--endpoint", "job-7"], []])
def test_a_tunnel_and_the_file_for_its_other_end(run: Run, home: Path, told: list[str]) -> None:
    result = run("connect", *told, "--login", "ada@login")
    assert result.exit_code == 0, result.output
    assert "  ssh -N -L 4711:n1:4711 ada@login\n" in result.output
    copied = re.search(r"scp ada@login:(\S+) \.\n +fastserve-hpc chat --endpoint \./(\S+)\n", result.output)
    assert copied is not None
    file = Path(copied[1])
    assert file.name == copied[2]
    assert load(file) == msgspec.structs.replace(SERVER, addresses=["tcp://127.0.0.1:4711"])
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_another_port_at_this_end(run: Run, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a job on the command line stands above the endpoint of the environment."""
    monkeypatch.setenv("FASTSERVE_HPC_ENDPOINT", "other")
    assert "ssh -N -L 9:n1:4711" in run("connect", "7", "--local-port", "9").output
    assert load(home / "tunnels" / "job-7.json").addresses == ["tcp://127.0.0.1:9"]


def test_files_of_servers_that_are_gone_are_removed(run: Run, home: Path) -> None:
    run("connect", "7")
    (home / "endpoints" / "job-7.json").unlink()
    write(home / "endpoints" / "job-8.json", msgspec.structs.replace(SERVER, name="job-8", job_id="8"))
    run("connect", "8")
    assert [path.name for path in (home / "tunnels").iterdir()] == ["job-8.json"]


def test_what_cannot_be_reached_is_said(run: Run, home: Path) -> None:
    assert "give one" in run("connect", "7", "--job", "7").stderr
    write(home / "endpoints" / "local.json", msgspec.structs.replace(SERVER, name="local", addresses=["ipc:///a"]))
    refused = run("connect", "--endpoint", "local")
    assert (refused.exit_code, "start it with --tcp" in refused.stderr) == (2, True)
    assert "no server of job 6" in run("connect", "6").stderr
