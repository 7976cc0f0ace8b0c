"""Show 5: what happens when a rank dies, raises, hangs or is told to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support import Server, descendants, is_alive

from fastserve_hpc.client import Client
from fastserve_hpc.errors import EndpointError

pytestmark = pytest.mark.mpi
RAISING_RANK = Path(__file__).with_name("raising_rank.py")
GONE_S = 5.0
FAKE = ("--model", "fake", "--pp", "2")


def _all_gone(pids: list[int], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while any(is_alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _family(server: Server) -> list[int]:
    return [server.process.pid, *descendants(server.process.pid)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("cleanup", [True, False], ids=["launcher cleans up", "launcher does not"])
def test_show_5_a_killed_rank_ends_all_in_5_s(start_server: Callable[..., Server], rank: int, cleanup: bool) -> None:
    launcher = () if cleanup else ("-disable-auto-cleanup",)
    server = start_server(*FAKE, ranks=2, launcher_args=launcher).wait_ready()
    family = _family(server)
    os.kill(server.rank_pid(rank), signal.SIGKILL)
    assert _all_gone(family, GONE_S), f"still there: {[p for p in family if is_alive(p)]}\n{server.output}"
    assert server.wait() != 0
    assert f"rank {rank}" in server.output or "killed" in server.output.lower()


@pytest.mark.parametrize("rank", [0, 1])
def test_show_5_a_rank_that_raises_ends_all_with_its_traceback(start_server: Callable[..., Server], rank: int) -> None:
    env = {"RAISING_RANK": str(rank)}
    server = start_server(*FAKE, ranks=2, program=[sys.executable, str(RAISING_RANK)], env=env).wait_ready()
    family = _family(server)
    with Client(server.endpoint_file()) as client, pytest.raises(EndpointError):
        client.generate("x", max_tokens=50, ignore_eos=True)
    assert _all_gone(family, GONE_S + 2), server.output
    assert server.wait() != 0
    assert "the sky is falling" in server.output
    assert "Traceback" in server.output
    assert f"rank {rank}" in server.output


@pytest.mark.parametrize("rank", [0, 1])
def test_show_5_a_stopped_rank_is_reported_within_the_heartbeat_bound(
    start_server: Callable[..., Server], rank: int
) -> None:
    server = start_server(*FAKE, "--heartbeat-s", "3", ranks=2).wait_ready()
    pid = server.rank_pid(rank)
    os.kill(pid, signal.SIGSTOP)
    try:
        server.wait_for_line(lambda line: f"rank {rank}" in line, timeout_s=3 + 2.5)
    finally:
        if is_alive(pid):
            os.kill(pid, signal.SIGCONT)
    assert server.wait() != 0


def test_show_5_sigterm_while_busy_drains(start_server: Callable[..., Server]) -> None:
    server = start_server(*FAKE, ranks=2).wait_ready()
    with Client(server.endpoint_file()) as client:
        stream = client.stream("count", max_tokens=400, ignore_eos=True)
        first = next(stream)
        for rank in (0, 1):
            os.kill(server.rank_pid(rank), signal.SIGTERM)
        rest = list(stream)
    assert sum(len(e.token_ids) for e in [first, *rest]) == 400
    assert rest[-1].finish_reason == "length"
    assert server.wait() == 0, server.output


def test_show_5_a_second_sigterm_ends_it_at_once(start_server: Callable[..., Server]) -> None:
    server = start_server(*FAKE, ranks=2).wait_ready()
    with Client(server.endpoint_file()) as client:
        stream = client.stream("count", max_tokens=100_000, ignore_eos=True)
        next(stream)
        os.kill(server.rank_pid(0), signal.SIGTERM)
        time.sleep(0.5)
        began = time.monotonic()
        os.kill(server.rank_pid(0), signal.SIGTERM)
        server.wait()
    assert time.monotonic() - began < 3.0


def test_show_5_new_work_is_refused_while_draining(start_server: Callable[..., Server]) -> None:
    server = start_server("--model", "fake").wait_ready()
    with Client(server.endpoint_file()) as client:
        stream = client.stream("count", max_tokens=8000, ignore_eos=True)
        first = next(stream)
        os.kill(server.process.pid, signal.SIGTERM)
        time.sleep(0.5)
        refused = server.run("submit", "hello", "--max-tokens", "4")
        assert refused.returncode != 0
        assert "drain" in refused.stderr
        assert sum(len(e.token_ids) for e in [first, *stream]) == 8000
    assert server.wait() == 0


def test_wrong_number_of_ranks_is_answered_with_the_right_one(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).parent / "mpiexec"), "-n", "2", sys.executable, "-m", "fastserve_hpc"]
    env = {**os.environ, "FASTSERVE_HPC_HOME": str(tmp_path)}
    result = subprocess.run(
        [*command, "serve", "--model", "fake", "--pp", "3"], env=env, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2
    assert "start with -n 3" in result.stderr
