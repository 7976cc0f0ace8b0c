from __future__ import annotations

from dataclasses import replace

from fake_client import STATUS


def test_what_was_counted_between_two_snapshots() -> None:
    then = replace(STATUS, details={"prefix_tokens": 10.0, "level_1": 4.0})
    details = {"prefix_tokens": 14.0, "uploaded_bytes": 3e6, "level_1": 9.0}
    now = replace(STATUS, uptime_s=STATUS.uptime_s + 5, preemptions=STATUS.preemptions + 2, details=details)
    assert now.counted_since(then) == {"preemptions": 2.0, "prefix_tokens": 4.0, "uploaded_bytes": 3e6}


def test_nothing_was_counted_since_an_engine_that_is_gone() -> None:
    assert replace(STATUS, uptime_s=1.0).counted_since(STATUS) == {}
