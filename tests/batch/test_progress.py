from __future__ import annotations

import json
import time

import pytest

from fastserve_hpc.batch.forecast import Forecast, clock, forecast
from fastserve_hpc.batch.progress import BarProgress, JsonProgress, PlainProgress, make_progress
from fastserve_hpc.batch.summary import Counts


def test_time_left_at_the_pace_of_this_run() -> None:
    counts = Counts(succeeded=20, skipped=40)
    assert forecast(counts, 100, 10.0, None) == Forecast(20.0)
    assert forecast(counts, 100, 10.0, None).text() == ", 0:00:20 left"
    assert forecast(counts, 100, 10.0, 25.0).fits
    assert forecast(Counts(succeeded=2), 100, 10.0, 25.0).text() == ""


def test_a_job_that_is_too_short_is_said() -> None:
    ahead = forecast(Counts(succeeded=20, skipped=40), 100, 10.0, 0.5)
    assert ahead.share_by_end == pytest.approx(0.61)
    assert ahead.text() == (
        ", 0:00:20 left; will not finish: the job ends in 0:00:00, with about 61 % done; "
        "the next run goes on from there"
    )
    assert forecast(Counts(succeeded=20), 100, 10.0, -5.0).share_by_end == pytest.approx(0.2)


def test_clock() -> None:
    assert [clock(s) for s in (-1, 59.6, 3723)] == ["0:00:00", "0:01:00", "1:02:03"]


def test_lines_for_people_and_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    counts = Counts(succeeded=20, failed=1, failed_before=2, skipped=9)
    for kind in (PlainProgress, JsonProgress):
        with kind(time.time() + 1e6) as progress:
            progress.reading(7)  # too early
            progress.begin(100)
            progress.update(counts)  # likewise
            progress._next = 0.0
            progress.update(counts)
            progress.say("hello")
    begin, plain, hello, state, message = capsys.readouterr().err.splitlines()
    assert (begin, hello) == ("batch: 100 lines", "batch: hello")
    assert plain.startswith("batch: 30 of 100 lines, 3 failed, 0 tokens/s, 0:00:0")
    shown = json.loads(state)
    assert (shown["event"], shown["finished"], shown["failed"], shown["lines"]) == ("progress", 30, 3, 100)
    assert shown["left_s"] is not None
    assert shown["share_by_job_end"] == 1.0
    assert json.loads(message) == {"event": "message", "text": "hello"}


def test_what_suits_the_place(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(make_progress(), PlainProgress)
    assert isinstance(make_progress(as_json=True), JsonProgress)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    bar = make_progress()
    assert isinstance(bar, BarProgress)
    with bar:
        bar.reading(2)
        bar.begin(3)
        bar.update(Counts(succeeded=3))
        bar.say("[done]")
    assert "[done]" in capsys.readouterr().err
