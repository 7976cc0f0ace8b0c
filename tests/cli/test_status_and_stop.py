from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from click.testing import Result
from fake_client import FakeServer

from fastserve_hpc.cli.status import duration

Run = Callable[..., Result]


def test_json_has_exactly_the_promised_keys(run: Run) -> None:
    assert json.loads(run("status", "--json").stdout) == {
        "state": "ready",
        "model": "fake",
        "max_model_len": 100,
        "world_size": 2,
        "tp": 1,
        "pp": 2,
        "policy": "fcfs",
        "running": 1,
        "waiting": 2,
        "device_blocks": {"total": 10, "used": 4},
        "host_blocks": {"total": 0, "used": 0},
        "preemptions": 3,
        "uptime_s": 61.5,
        "details": {},
    }


def test_the_table_is_for_people(run: Run) -> None:
    output = run("status").stdout
    assert "ready, up 1 min 2 s" in output
    assert "1 running, 2 waiting, 3 preemptions" in output
    assert "4 of 10 blocks used (40 %)" in output
    assert "0 of 0 blocks used" in output


def test_the_table_tells_what_kv_was_moved(run: Run, server: FakeServer) -> None:
    details = {"offloaded_bytes": 2.5e6, "uploaded_bytes": 1e6, "stall_s": 0.25, "prefix_tokens": 1200.0}
    server.status = replace(server.status, details={**details, "recomputed_tokens": 7.0})
    output = run("status").stdout
    assert "2.5 MB offloaded, 1.0 MB uploaded, 0.2 s waited for it" in output
    assert "1,200 tokens of prefixes; 7 computed again" in output


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (60, "1 min 0 s"), (3725, "1 h 2 min")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_stop_drains_and_waits_for_the_end(run: Run, server: FakeServer) -> None:
    assert run("stop").exit_code == 0
    assert server.drained == [False]


def test_stop_now(run: Run, server: FakeServer) -> None:
    assert run("stop", "--now", "--wait", "0").exit_code == 0
    assert server.drained == [True]


def test_stop_says_when_it_does_not_wait_longer(run: Run, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "current_status", lambda: server.status)
    result = run("stop", "--wait", "0.3")
    assert result.exit_code == 75
    assert result.stderr.startswith("waiting for 3 requests to finish\nstill draining after 0.3 s")
