from __future__ import annotations

import asyncio
import time

import pytest
from fake_client import FakeAsyncClient, FakeServer

from fastserve_hpc.bench.load import Outcome, Run, report, run_load
from fastserve_hpc.bench.trace import Load, make_prompts
from fastserve_hpc.errors import RequestError


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    server = FakeServer()
    monkeypatch.setattr(FakeAsyncClient, "server", server)
    return server


def made(loads: list[Load], one_by_one: bool = False) -> Run:
    return Run(loads, make_prompts(loads, 1000, 0), one_by_one)


def run(loads: list[Load], one_by_one: bool = False) -> tuple[list[Outcome], float]:
    finished: list[Outcome] = []
    outcomes, wall_s = asyncio.run(
        run_load(FakeAsyncClient(), made(loads, one_by_one), lambda o, _: finished.append(o))
    )
    assert sorted(finished, key=id) == sorted(outcomes, key=id)
    return outcomes, wall_s


def test_lengths_are_exactly_the_traces(server: FakeServer) -> None:
    outcomes, _ = run([Load(0.0, 5, 3), Load(0.01, 7, 1)])
    assert [outcome.output_tokens for outcome in outcomes] == [3, 1]
    assert [len(request["prompt"]) for request in server.requests] == [5, 7]
    assert all(request["ignore_eos"] for request in server.requests)


def test_times_count_from_the_due_time(server: FakeServer) -> None:
    server.delay_s = 0.05
    outcomes, wall_s = run([Load(1.0, 1, 2), Load(1.2, 1, 2)])
    assert all(0.05 <= outcome.first_s < 0.1 + 0.05 for outcome in outcomes)
    assert all(0.1 <= outcome.last_s < 0.2 + 0.05 for outcome in outcomes)
    assert wall_s == pytest.approx(0.3, abs=0.1)


def test_waiting_inside_this_client_counts() -> None:
    loads = [Load(0.0, 1, 1), Load(0.0, 1, 1)]

    class Blocking(FakeAsyncClient):
        def stream(self, prompt: object, **options: object):  # type: ignore[no-untyped-def]
            time.sleep(0.05)
            return super().stream(prompt, **options)

    outcomes, _ = asyncio.run(run_load(Blocking(), made(loads), lambda *_: None))
    assert outcomes[1].first_s >= 0.1


def test_a_single_stream_has_one_request_at_a_time_each_due_when_the_one_before_ended(server: FakeServer) -> None:
    server.delay_s = 0.02
    outcomes, wall_s = run([Load(0.0, 1, 4)] * 5, one_by_one=True)
    assert server.most_in_flight == 1
    assert all(0.08 <= outcome.last_s < 0.08 + 0.3 for outcome in outcomes)
    assert wall_s >= sum(outcome.last_s for outcome in outcomes)


def test_a_refused_request_counts_as_failed(server: FakeServer) -> None:
    server.errors["ids"] = [RequestError("no")]
    outcomes, wall_s = run([Load(0.0, 1, 1), Load(0.01, 1, 1)])
    assert [outcome.error for outcome in outcomes] == ["no", None]
    assert report(outcomes, wall_s)["failed"] == 1


def test_the_report_has_exactly_the_promised_keys() -> None:
    outcomes = [Outcome(5, 0.5, 2.5), Outcome(1, 0.1, 0.1), Outcome(error="x")]
    result = report(outcomes, 2.0)
    assert list(result) == [
        "requests",
        "failed",
        "wall_s",
        "output_tokens_per_s",
        "decode_tokens_per_s",
        "ttft_s",
        "tpot_s",
        "latency_s",
        "normalized_latency_s",
    ]
    assert result["decode_tokens_per_s"] == 2.0
    assert (result["requests"], result["failed"], result["output_tokens_per_s"]) == (3, 1, 3.0)
    assert result["ttft_s"]["mean"] == pytest.approx(0.3)
    assert result["tpot_s"]["mean"] == pytest.approx(0.5)
    assert result["normalized_latency_s"]["p50"] == pytest.approx((0.5 + 0.1) / 2)
    assert all(list(result[name]) == ["mean", "p50", "p90", "p95", "p99"] for name in list(result)[5:])
