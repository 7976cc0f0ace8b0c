"""The scheduler's Shows, each in a small version. The whole ones: benchmarks/reproduction.py, never_worse.py,
starvation.py, hints.py and scheduler.py."""

from __future__ import annotations

import hints
import never_worse
import pytest
import reproduction
import scheduler
import starvation
from support import REPOSITORY
from workloads import site

TRACES = REPOSITORY.parent / "shared" / "traces"


def mean_s(policy: str, rate: float) -> float:
    (point,) = reproduction.study(reproduction.SETUPS[0], 400, 0, policy).at_rates([rate])
    return point.normalized_latency_s["mean"] or 0.0


def test_show_1_twice_the_load_of_fcfs_before_answers_are_slow() -> None:
    """OPT-13B under ShareGPT: fcfs passes 0.3 s/token before 2.4 requests/s, skip-join later than twice that."""
    assert mean_s("fcfs", 2.4) > 0.3
    assert mean_s("skip-join", 4.8) < 0.3


def test_show_3_never_worse_without_a_queue_and_much_better_with_one() -> None:
    place = site("sharegpt", TRACES, 16, 400)
    assert never_worse.passes(never_worse.compare(place, 0.5, 1))
    assert never_worse.passes(never_worse.compare(place, 1.2, 1), max_mean=0.5)


def test_show_3_requests_that_are_alike() -> None:
    for prompt, output in never_worse.ALIKE:
        found = never_worse.alike(prompt, output, 16)
        assert max(found.mean, found.p99) <= 1.02, (prompt, output)


@pytest.mark.skipif(not TRACES.exists(), reason="needs the traces")
def test_show_3_long_prompts_with_short_answers_do_not_pay() -> None:
    """Where prompts are most of the work and many are passed by, the tail is made of them."""
    place = site("azure", TRACES, 64, 1200)
    runs = [place.run(policy, place.arrivals(1.2, 3)) for policy in ("skip-join", "fcfs")]
    assert runs[0].mean <= runs[1].mean
    assert runs[0].p99 <= 1.02 * runs[1].p99


def test_show_4_a_long_answer_under_endless_short_ones() -> None:
    fcfs_s, ours_s, goes_on = starvation.times(starvation.place_of(5, 60, 16, 5000), 1.2)
    assert goes_on
    assert ours_s <= 1.5 * fcfs_s


def test_show_5_hints_help_while_they_are_right_and_never_harm() -> None:
    found = hints.compare(site("sharegpt", TRACES, 16, 400), 1.2, 1, wrong=("noisy:0.5", "shuffled"))
    assert hints.passes(*found), found


def test_show_6_a_long_queue_costs_nothing() -> None:
    """Twice the time that is asked for: the machine may be busy."""
    short, long = (float(scheduler.measure("skip-join", 256, queued)["median_us"]) for queued in (100, 20_000))
    assert short <= 2 * scheduler.MAX_US
    assert long <= 1.2 * scheduler.MAX_GROWTH * short
