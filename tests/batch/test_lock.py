from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from fastserve_hpc.batch import lock as lock_module
from fastserve_hpc.batch.lock import Holder, OutputLock
from fastserve_hpc.errors import ConfigError, FastServeError

HOLD = """
import sys, time
from pathlib import Path
from fastserve_hpc.batch.lock import OutputLock
lock = OutputLock(Path(sys.argv[1]), Path("out"))
lock.acquire()
print("held", flush=True)
sys.stdin.readline()
lock.release()
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "PATIENCE_S", 0.3)
    monkeypatch.setattr(lock_module, "RENEW_S", 0.05)
    monkeypatch.setattr(lock_module, "LEASE_S", 1.0)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def take(path: Path) -> OutputLock:
    lock = OutputLock(path, Path("out"))
    lock.acquire()
    return lock


def from_elsewhere(path: Path, number: int = 1, beat: int = 0) -> Path:
    """A lock file of a process on another host."""
    file = path / f"lock-{number:06d}"
    elsewhere = Holder("far", "another kernel", os.getpid(), "1", "token", beat)
    file.write_bytes(msgspec.json.encode(elsewhere))
    return file


def test_one_at_a_time_and_the_next_one_at_once(tmp_path: Path) -> None:
    first = take(tmp_path)
    with pytest.raises(ConfigError, match=rf"another run \(process {os.getpid()} on .*\) is writing to it"):
        take(tmp_path)
    first.release()
    first.release()
    second = take(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lock-000002"]
    second.release()


def test_a_killed_holder_is_replaced_at_once(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    with pytest.raises(ConfigError, match=f"process {holder.pid}"):
        take(tmp_path)
    holder.send_signal(signal.SIGKILL)
    start = time.monotonic()
    take(tmp_path).release()  # the process may still be a zombie
    assert time.monotonic() - start < 0.5


def test_a_holder_that_ends_soon_is_waited_for(
    tmp_path: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_module, "PATIENCE_S", 20.0)
    said: list[str] = []
    lock = OutputLock(tmp_path, Path("out"), said.append)
    assert holder.stdin is not None
    threading.Timer(0.3, holder.stdin.close).start()
    lock.acquire()
    assert said == [f"waiting for another run (process {holder.pid} on {os.uname().nodename}) to let go of out"]
    lock.release()


def test_a_silent_holder_on_another_host_is_replaced_after_its_lease(tmp_path: Path) -> None:
    from_elsewhere(tmp_path)
    start = time.monotonic()
    lock = take(tmp_path)
    assert time.monotonic() - start >= 1.0
    lock.release()


def test_a_live_holder_on_another_host_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "PATIENCE_S", 1.5)
    stop = threading.Event()

    def beat() -> None:
        number = 0
        while not stop.wait(0.1):
            number += 1
            from_elsewhere(tmp_path, beat=number)

    from_elsewhere(tmp_path)
    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(ConfigError, match="another run .*is writing to it"):
            take(tmp_path)
    finally:
        stop.set()
        thread.join()


def test_whoever_was_replaced_writes_nothing_more(tmp_path: Path) -> None:
    sleeper = take(tmp_path)
    successor = from_elsewhere(tmp_path, number=2)
    (tmp_path / "lock-000001").unlink()
    time.sleep(0.1)
    with pytest.raises(FastServeError, match="another run has taken over"):
        sleeper.renew()
    sleeper.release()
    assert successor.exists()


def test_of_many_who_want_a_dead_holder_s_lock_one_gets_it(tmp_path: Path) -> None:
    gone = Holder("here", lock_module._kernel(), 2**22 + 1, "1", "token")
    (tmp_path / "lock-000001").write_bytes(msgspec.json.encode(gone))
    outcomes: list[OutputLock | None] = []

    def contend() -> None:
        lock = OutputLock(tmp_path, Path("out"))
        try:
            lock.acquire()
            outcomes.append(lock)
        except ConfigError:
            outcomes.append(None)

    threads = [threading.Thread(target=contend) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [lock for lock in outcomes if lock is not None]
    winner.renew()
    winner.release()
    assert len(outcomes) == 8


def test_without_hard_links_it_works_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    first = take(tmp_path)
    with pytest.raises(ConfigError):
        take(tmp_path)
    first.release()
    take(tmp_path).release()
