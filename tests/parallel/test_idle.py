"""Pauses grow with the wait, and waits keep the rest of the rank going."""

import os
import time

import pytest

from fastserve_hpc.errors import RankError
from fastserve_hpc.parallel.idle import DOZE_AFTER_S, Backoff, Waiter, sharpen_sleeps


class Clock:
    """Stands in for time and the scheduler: sleeping moves it on."""

    def __init__(self, monkeypatch):
        self.now, self.sleeps, self.yields = 100.0, [], 0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self.sleep)
        monkeypatch.setattr(os, "sched_yield", self.give_way)

    def sleep(self, seconds):
        self.sleeps.append(seconds)
        self.now += seconds

    def give_way(self):
        self.yields += 1
        self.now += 1e-6


def test_pauses_first_give_way_then_sleep_ever_longer(monkeypatch):
    clock = Clock(monkeypatch)
    backoff = Backoff(spin_s=100e-6, longest_s=5e-3)
    while clock.now < 101.0:
        backoff.pause()
    assert 90 <= clock.yields <= 110
    assert clock.sleeps == sorted(clock.sleeps)
    assert clock.sleeps[0] == 20e-6
    assert clock.sleeps[-1] == 5e-3
    assert len(clock.sleeps) < 500


def test_a_wait_is_prolonged_by_a_small_share(monkeypatch):
    clock = Clock(monkeypatch)
    for length in (1e-3, 10e-3, 100e-3):
        backoff, start = Backoff(), clock.now
        while clock.now - start < length:
            backoff.pause()
        assert clock.now - start < length * 1.05


def test_work_resets_the_pause(monkeypatch):
    clock = Clock(monkeypatch)
    backoff = Backoff(spin_s=0)
    while clock.now < 101.0:
        backoff.pause()
    backoff.reset()
    backoff.pause()
    assert clock.sleeps[-1] == 20e-6


def test_a_long_wait_is_a_doze_until_woken(monkeypatch):
    clock, dozes = Clock(monkeypatch), []

    def doze(seconds):
        dozes.append(clock.now)
        clock.now += seconds / 2 if len(dozes) == 3 else seconds
        return len(dozes) == 3

    backoff = Backoff(doze=doze)
    while len(dozes) < 3:
        backoff.pause()
    assert dozes[0] == pytest.approx(100.0 + DOZE_AFTER_S, abs=0.01)
    assert dozes[2] - dozes[1] == pytest.approx(1.0)
    clock.sleeps.clear()
    while not clock.sleeps:
        backoff.pause()
    assert clock.sleeps == [20e-6], "woken, it looks closely again"


def test_a_wait_ends_when_done_and_runs_the_hook_meanwhile():
    waiter, calls = Waiter(), []
    waiter.set_hook(lambda: calls.append(1))
    waiter.until(lambda: len(calls) == 3)
    assert len(calls) == 3


def test_a_wait_of_nothing_costs_nothing():
    calls = []
    waiter = Waiter(check=lambda: calls.append("check"))
    waiter.set_hook(lambda: calls.append("hook"))
    waiter.until(lambda: True)
    assert calls == []


def test_a_wait_ends_with_the_error_of_the_check():
    def check():
        raise RankError("rank 1 is lost")

    with pytest.raises(RankError, match="rank 1 is lost"):
        Waiter(check).until(lambda: False)


def test_a_wait_with_a_limit_names_what_it_waited_for():
    with pytest.raises(RankError, match=r"waited 0.02 s for all ranks to end"):
        Waiter().until(lambda: False, 0.02, "all ranks to end")


def test_a_hook_that_waits_is_not_called_again_from_within():
    waiter, depths = Waiter(), []

    def hook():
        depths.append(1)
        waiter.run_hook()

    waiter.set_hook(hook)
    waiter.run_hook()
    waiter.run_hook()
    assert len(depths) == 2


def test_sharpened_sleeps_still_sleep():
    sharpen_sleeps()
    start = time.perf_counter()
    time.sleep(2e-3)
    assert time.perf_counter() - start >= 2e-3
