"""Dead, stopped and failing ranks are named and all ranks end; ranks that end as planned raise no alarm."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("watchdog_rank.py")
ROOT = Path(__file__).parents[2]


class Ranks:
    """`world` processes with watchdogs, connected to each other."""

    def __init__(self, tmp_path, world=3, heartbeat_s=2.0):
        self.world, self.heartbeat_s, self.tmp_path = world, heartbeat_s, tmp_path
        self.processes = []
        self.start(0)
        self.port, self.secret = self.processes[0].stdout.readline().split()

    def start(self, rank, *arguments):
        command = [sys.executable, SCRIPT, str(rank), str(self.world), str(self.heartbeat_s), *arguments]
        with open(self.tmp_path / f"stderr-{rank}", "wb") as stderr:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": stderr}
            env = {**os.environ, "PYTHONPATH": str(ROOT)}
            self.processes.append(subprocess.Popen(command, **pipes, env=env, text=True, bufsize=1))

    def connect(self):
        for rank in range(1, self.world):
            self.start(rank, self.port, self.secret)
        for process in self.processes:
            assert process.stdout.readline() == "up\n"
        return self

    def order(self, rank, line):
        self.processes[rank].stdin.write(line + "\n")

    def codes(self, timeout, but=()):
        """The exit codes of all but some ranks, all of which must end within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        return [p.wait(max(deadline - time.monotonic(), 0.01)) for r, p in enumerate(self.processes) if r not in but]

    def stderr(self, rank):
        return (self.tmp_path / f"stderr-{rank}").read_text()

    def end(self):
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def make_ranks(tmp_path):
    made = []

    def make(**settings):
        made.append(Ranks(tmp_path, **settings))
        return made[-1]

    yield make
    for ranks in made:
        ranks.end()


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_is_named_and_all_end(make_ranks, victim):
    ranks = make_ranks().connect()
    pid = ranks.processes[victim].pid
    ranks.processes[victim].kill()
    assert ranks.codes(timeout=5, but=[victim]) == [1, 1]
    witness = 1 if victim == 0 else 0
    assert (
        f"rank {victim} (pid {pid} on {socket.gethostname()}) is lost, all ranks end: its connection closed"
        in ranks.stderr(witness)
    )
    assert ranks.stderr(witness).count("\n") == 1
    if victim != 0:
        assert ranks.stderr(3 - victim) == "", "rank 0 speaks for all"
    assert ranks.processes[witness].stdout.read() == "tidied\n"


@pytest.mark.parametrize("victim", [0, 2])
def test_a_stopped_rank_is_named_within_the_heartbeat(make_ranks, victim):
    ranks = make_ranks(heartbeat_s=2.0).connect()
    ranks.processes[victim].send_signal(signal.SIGSTOP)
    stopped_at = time.monotonic()
    assert ranks.codes(timeout=8, but=[victim]) == [1, 1]
    assert 1.0 < time.monotonic() - stopped_at < 2.0 + 0.5
    words = ranks.stderr(1 if victim == 0 else 0)
    assert f"rank {victim} (pid {ranks.processes[victim].pid}" in words
    assert "no sign of life" in words
    ranks.processes[victim].send_signal(signal.SIGCONT)
    assert ranks.processes[victim].wait(5) == 1


@pytest.mark.parametrize("victim", [0, 1])
def test_an_exception_is_printed_by_rank_0_with_its_traceback(make_ranks, victim):
    ranks = make_ranks().connect()
    ranks.order(victim, "raise")
    assert ranks.codes(timeout=5) == [1, 1, 1]
    text = ranks.stderr(0)
    assert f"rank {victim} (pid {ranks.processes[victim].pid} on {socket.gethostname()}) failed, all ranks end:" in text
    assert "Traceback" in text
    assert "ZeroDivisionError: the test asked for it" in text
    assert ranks.stderr(1) == ranks.stderr(2) == ""


def test_our_own_errors_come_without_traceback_and_with_their_exit_code(make_ranks):
    ranks = make_ranks().connect()
    ranks.order(2, "config")
    assert ranks.codes(timeout=5) == [2, 2, 2]
    assert "failed, all ranks end: --tp 3 makes no sense here" in ranks.stderr(0)
    assert "Traceback" not in ranks.stderr(0)


def test_who_was_told_to_stop_has_not_failed(make_ranks):
    ranks = make_ranks().connect()
    ranks.order(0, "stop")
    assert ranks.codes(timeout=5) == [75, 75, 75]
    assert "ends, all ranks end: told to stop" in ranks.stderr(0)
    assert "failed" not in ranks.stderr(0)


def test_all_ranks_failing_at_once_print_one_message(make_ranks):
    ranks = make_ranks().connect()
    for rank in range(3):
        with contextlib.suppress(BrokenPipeError):  # the rank has ended already because of another one
            ranks.order(rank, "config")
    assert ranks.codes(timeout=5) == [2, 2, 2]
    assert sum(ranks.stderr(rank).count("makes no sense") for rank in range(3)) == 1


def test_leaving_without_a_goodbye_is_an_alarm(make_ranks):
    ranks = make_ranks().connect()
    ranks.order(1, "leave")
    assert ranks.codes(timeout=5) == [1, 3, 1]
    assert "rank 1" in ranks.stderr(0)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_a_planned_end_raises_no_alarm(make_ranks, order):
    ranks = make_ranks(heartbeat_s=0.6).connect()
    for rank in order:
        ranks.order(rank, "close")
        assert ranks.processes[rank].wait(5) == 0
        time.sleep(0.8)
    assert [ranks.stderr(rank) for rank in range(3)] == ["", "", ""]


def test_closing_all_at_once_raises_no_alarm(make_ranks):
    ranks = make_ranks(world=6).connect()
    for rank in range(6):
        ranks.order(rank, "close")
    assert ranks.codes(timeout=10) == [0] * 6
    assert [ranks.stderr(rank) for rank in range(6)] == [""] * 6


def test_a_suspended_job_goes_on(make_ranks):
    ranks = make_ranks(heartbeat_s=1.0).connect()
    for process in ranks.processes:
        process.send_signal(signal.SIGSTOP)
    time.sleep(2.5)
    for process in reversed(ranks.processes):
        process.send_signal(signal.SIGCONT)
    time.sleep(2)
    assert [process.poll() for process in ranks.processes] == [None] * 3
    for rank in range(3):
        ranks.order(rank, "close")
    assert ranks.codes(timeout=5) == [0, 0, 0]


def test_a_short_lock_of_the_interpreter_is_no_alarm_and_a_long_one_is(make_ranks):
    ranks = make_ranks(heartbeat_s=2.0).connect()
    ranks.order(1, "hold 1")
    assert ranks.processes[1].stdout.readline() == "obeyed\n"
    assert ranks.processes[0].poll() is None
    ranks.order(1, "hold 6")
    assert ranks.processes[0].wait(4) == 1
    assert "rank 1" in ranks.stderr(0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_may_ask_for_patience_and_take_it_back(make_ranks, rank):
    ranks = make_ranks(heartbeat_s=1.0).connect()
    for line in ("allow 20", "hold 2.5", "allow 1"):
        ranks.order(rank, line)
        assert ranks.processes[rank].stdout.readline() == "obeyed\n"
    ranks.order(rank, "hold 4")
    assert ranks.processes[2].wait(3) == 1
    assert f"rank {rank}" in ranks.stderr(1 - rank if rank == 1 else 2)


def test_strangers_get_nothing_and_hold_up_nobody(make_ranks):
    ranks = make_ranks()
    strangers = [socket.create_connection(("127.0.0.1", int(ranks.port))) for _ in range(20)]
    for stranger in strangers[:10]:
        stranger.sendall(bytes(52))
    started = time.monotonic()
    ranks.connect()
    assert time.monotonic() - started < 4
    for stranger in strangers[:10]:
        stranger.settimeout(5)
        assert len(stranger.recv(1000)) == 32
        assert stranger.recv(1000) == b"", "dropped without a further word"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(ranks.port)))
    for rank in range(3):
        ranks.order(rank, "close")
    assert ranks.codes(timeout=8) == [0, 0, 0]


def test_a_rank_that_never_joins_is_named():
    code = (
        "from fastserve_hpc.parallel.watchdog_join import Listener\n"
        "Listener(one_host=True).gather([1, 2], timeout_s=0.3)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=20)
    assert "RankError: the watchdogs of ranks [1, 2] did not join within 0.3 s" in result.stderr


def test_rank_0_wakes_the_others_from_their_doze(make_ranks):
    ranks = make_ranks(world=3).connect()
    for rank in (1, 2):
        ranks.order(rank, "doze 0.1")
        assert ranks.processes[rank].stdout.readline().startswith("False 0.1")
        assert ranks.processes[rank].stdout.readline() == "obeyed\n"
        ranks.order(rank, "doze 30")
    time.sleep(0.3)
    ranks.order(0, "wake")
    for rank in (1, 2):
        woken, after_s = ranks.processes[rank].stdout.readline().split()
        assert woken == "True"
        assert float(after_s) < 10.0
