from __future__ import annotations

from datetime import datetime

import pytest

from fastserve_hpc.batch.deadline import NO_BOUND, Pacer, parse_deadline
from fastserve_hpc.batch.summary import Counts
from fastserve_hpc.errors import ConfigError

NOW = datetime(2030, 1, 31, 17, 0, 0)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90m", 5400),
        ("1h30m", 5400),
        ("45s", 45),
        ("2d", 172800),
        ("18:30", 5400),
        ("16:59", 86400 - 60),
        ("2030-01-31T18:00", 3600),
        ("2030-01-31 17:00:10", 10),
    ],
)
def test_times_and_durations(text: str, seconds: float) -> None:
    assert parse_deadline(text, NOW) - NOW.timestamp() == seconds


@pytest.mark.parametrize("text", ["", "soon", "25:00", "90", "-5m", "5m3h"])
def test_what_is_no_time_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigError, match="write 18:30"):
        parse_deadline(text, NOW)


class Run:
    """A run whose pace grows with the slowdown that it is allowed, up to that of the whole server."""

    def __init__(self, total: int, seconds: float, most: float = 100.0) -> None:
        self.now, self.counts, self.total, self.most = 0.0, Counts(), total, most
        self.said: list[str] = []
        self.pacer = Pacer(seconds, total, 1.25, self.said.append, now=lambda: self.now)
        self.slowdowns: list[float] = []

    def go(self, seconds: float) -> float:
        """When it was done, or where it is."""
        done = float(self.counts.succeeded)
        while self.now < seconds and self.counts.finished < self.total:
            self.now += 1.0
            slowdown = self.pacer.slowdown
            done += self.most * (1 - 1 / slowdown)
            self.counts.succeeded = min(self.total, int(done))
            self.pacer.tick(self.counts)
            self.slowdowns.append(self.pacer.slowdown)
        return self.now


def test_there_is_time_enough_and_nobody_is_slowed_down_more() -> None:
    run = Run(1000, 100.0)
    assert run.go(200) <= 100
    assert set(run.slowdowns) == {1.25}
    assert run.said == []


@pytest.mark.parametrize("total", [3000, 5000, 8000])
def test_it_hurries_as_far_as_it_must(total: int) -> None:
    run = Run(total, 100.0)
    assert run.go(200) <= 100
    assert max(run.slowdowns) > 1.25
    assert run.said == []


def test_what_cannot_be_done_is_said_early_and_once() -> None:
    run = Run(30_000, 100.0)
    run.go(30)
    (text,) = run.said
    run.go(50)
    assert run.pacer.slowdown == NO_BOUND
    assert text.startswith("will not be done by the deadline, in 0:0")
    assert 25 <= int(text.split("about ")[1].split()[0]) <= 33
    run.go(110)
    assert len(run.said) == 1


def test_a_deadline_that_has_passed_is_said() -> None:
    run = Run(1000, -1.0)
    run.go(20)
    assert run.said == ["the deadline has passed; the run goes on"]


def test_nobody_is_slowed_down_more_before_long_answers_could_have_come() -> None:
    run = Run(1000, 100.0, most=0.0)
    run.go(9)
    assert set(run.slowdowns) == {1.25}
    run.go(30)
    assert run.pacer.slowdown > 1.25
