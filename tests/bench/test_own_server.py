"""A server that `bench` starts itself: real processes, with the fake model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import is_alive

from fastserve_hpc.bench.own_server import OwnServer
from fastserve_hpc.bench.processes import OthersWatch, cpu_s, family, peak_rss_bytes
from fastserve_hpc.errors import ConfigError, RankError


def bench(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fastserve_hpc", "bench", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_server_for_the_time_of_a_benchmark() -> None:
    result = bench("--workload", "w3", "--requests", "2", "--serve", "--json", "--", "--model", "fake")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["workload"], report["requests"], report["failed"]) == ("w3", 2, 0)
    assert set(report["server"]["cpu_s"]) == set(report["server"]["peak_rss_bytes"]) == {"ingress", "rank 0"}
    assert all(10e6 < size < 1e9 for size in report["server"]["peak_rss_bytes"].values())
    assert set(report["machine"]) == {"cores", "load_average", "other_busy_cores"}


def test_options_of_a_server_without_one_are_refused() -> None:
    result = bench("--workload", "w1", "--", "--model", "fake")
    assert result.returncode == 2
    assert "--model fake: the options of a server are for --serve" in result.stderr


def test_it_is_gone_afterwards_with_all_that_it_wrote() -> None:
    with OwnServer(["--model", "fake"]) as server:
        pids = family(server._process.pid)
        home = Path(server.endpoint).parents[1]
        assert len(pids) >= 2
        assert home.exists()
    assert not any(map(is_alive, pids))
    assert not home.exists()


def test_a_server_that_cannot_start_is_said_so(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankError, match="exit status 2 before it was ready"):
        OwnServer(["--model", "no/such/model"])
    assert "no/such/model" in capfd.readouterr().err
    with pytest.raises(ConfigError, match="tp"):
        OwnServer(["--tp", "three"])


def test_a_tick_within_a_moment_is_not_more_cores_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = OthersWatch()
    monkeypatch.setattr(watch, "_before", watch._before - 1000.0)
    assert watch.busy_cores() == os.cpu_count()


def test_what_a_process_uses() -> None:
    watch = OthersWatch()
    assert cpu_s(os.getpid()) > 0
    assert peak_rss_bytes(os.getpid()) > 1e6
    assert (cpu_s(2**22 + 1), peak_rss_bytes(2**22 + 1)) == (0.0, 0)
    assert 0 <= watch.busy_cores() <= (os.cpu_count() or 1)
