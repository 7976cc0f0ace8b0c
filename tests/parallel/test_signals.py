"""Signals reach the thread, not the program; the second one is urgent."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fastserve_hpc.parallel.signals import SignalThread, Stop

ROOT = Path(__file__).parents[2]
PROGRAM = """
import subprocess, sys
from fastserve_hpc.parallel.signals import SignalThread, block_signals
block_signals()
SignalThread(lambda stop: print(stop.name, flush=True)).start()
process = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE)
print(process.pid, flush=True)
process.wait()
print("child", process.returncode, flush=True)
"""
CHILD = "import sys; print('up', flush=True); sys.stdin.read()"
UNBLOCKING_CHILD = f"from fastserve_hpc.parallel.signals import unblock_signals; unblock_signals(); {CHILD}"


class Program:
    def __init__(self, child):
        command = [sys.executable, "-c", PROGRAM, child]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        lines = {self.line(), self.line()}
        self.child_pid = int(next(line for line in lines if line != "up"))

    def line(self):
        return self.process.stdout.readline().strip()

    def send(self, number):
        self.process.send_signal(number)
        return self.line()


@pytest.fixture
def program():
    made = []

    def start(child=CHILD):
        made.append(Program(child))
        return made[-1]

    yield start
    for each in made:
        each.process.kill()
        each.process.communicate()


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains_the_second_stops(program, first, second):
    running = program()
    assert running.send(first) == ("DRAIN_SOON" if first == signal.SIGTERM else "DRAIN")
    time.sleep(0.3)
    assert running.send(second) == "NOW"


def test_a_child_inherits_the_block(program):
    running = program()
    subprocess.run(["kill", "-TERM", str(running.child_pid)], check=True)
    time.sleep(0.2)
    subprocess.run(["kill", "-KILL", str(running.child_pid)], check=True)
    assert running.line() == "child -9"


def test_a_child_that_unblocks_obeys(program):
    running = program(UNBLOCKING_CHILD)
    subprocess.run(["kill", "-TERM", str(running.child_pid)], check=True)
    assert running.line() == "child -15"


@pytest.mark.parametrize(
    ("signals", "meanings"),
    [
        ([(signal.SIGINT, 0.0), (signal.SIGINT, 0.1)], [Stop.DRAIN, None]),
        ([(signal.SIGINT, 0.0), (signal.SIGINT, 0.3)], [Stop.DRAIN, Stop.NOW]),
        ([(signal.SIGUSR1, 0.0), (signal.SIGUSR1, 9.0)], [Stop.DRAIN, None]),
        ([(signal.SIGTERM, 0.0), (signal.SIGTERM, 9.0)], [Stop.DRAIN_SOON, Stop.NOW]),
        ([(signal.SIGUSR1, 0.0), (signal.SIGTERM, 9.0), (signal.SIGTERM, 10.0)], [Stop.DRAIN, Stop.NOW, Stop.NOW]),
    ],
)
def test_one_stroke_counts_once(signals, meanings):
    thread = SignalThread(print)
    assert [thread._meaning(number, now) for number, now in signals] == meanings
