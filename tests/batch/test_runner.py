from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batch_files import item, items, open_output, records
from fake_client import FakeAsyncClient, FakeServer

from fastserve_hpc.batch import server as server_module
from fastserve_hpc.batch.reader import BatchItem, LineError
from fastserve_hpc.batch.runner import BatchRunner
from fastserve_hpc.batch.server import BatchServer, sampling_fields
from fastserve_hpc.batch.summary import MAX_SAMPLES, Counts, Samples
from fastserve_hpc.client.results import Event
from fastserve_hpc.core.request import SamplingParams
from fastserve_hpc.errors import BusyError, ConfigError, EndpointError, RequestError


class Silent:
    def update(self, counts: Counts) -> None:
        self.last = counts.finished


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    server = FakeServer()
    monkeypatch.setattr(FakeAsyncClient, "server", server)
    monkeypatch.setattr(server_module, "BUSY_WAIT_S", (0.001, 0.01))
    monkeypatch.setattr(server_module, "LOST_WAIT_S", (0.001, 0.01))
    return server


def run(out: Path, todo: list[BatchItem | LineError], in_flight: int = 8, **server_options: Any) -> Counts:
    with open_output(out) as output:
        done = output.done.lines
        server = BatchServer(FakeAsyncClient(), "fake", **server_options)
        runner = BatchRunner(server, output, Silent(), in_flight)
        asyncio.run(runner.run([item for item in todo if item.index not in done]))
        return runner.counts


def results(out: Path) -> dict[Any, Any]:
    return {record["custom_id"]: record for record in records(out)}


@pytest.mark.parametrize("wants_ttft", [False, True])
def test_every_item_is_answered_as_class_batch(server: FakeServer, tmp_path: Path, wants_ttft: bool) -> None:
    counts = run(tmp_path / "out", items(20, max_tokens=2, seed=5), wants_ttft=wants_ttft)
    assert (counts.succeeded, counts.failed, counts.output_tokens) == (20, 0, 40)
    assert results(tmp_path / "out")["id-7"]["response"]["body"]["choices"][0]["text"] == "echo prompt"
    assert all(r["service_class"] == "batch" and r["seed"] == 5 for r in server.requests)
    assert (counts.summary()["ttft_s"]["p50"] is not None) == wants_ttft


def test_what_requests_may_cost_others_is_told_and_changed(server: FakeServer, tmp_path: Path) -> None:
    run(tmp_path / "out", items(1), slowdown=1.5)
    assert [request["slowdown"] for request in server.requests] == [1.5]
    told = BatchServer(FakeAsyncClient(), "fake", slowdown=1.5)
    for slowdown in (1.5, 8.0, 8.0):
        asyncio.run(told.steer(slowdown))
    assert server.steered == [8.0]
    asyncio.run(told.answer(item(1)))
    assert server.requests[-1]["slowdown"] == 8.0


def test_what_the_server_counted_is_what_is_new(server: FakeServer) -> None:
    before = replace(server.status, details={"prefix_tokens": 10.0, "energy_j": 5.0})
    asked = BatchServer(FakeAsyncClient(), "fake")
    server.status = replace(before, preemptions=before.preemptions + 2, details={"prefix_tokens": 14.0})
    assert asyncio.run(asked.used_since(before)) == {"preemptions": 2.0, "prefix_tokens": 4.0}
    server.status = replace(before, uptime_s=0.5)  # another server
    assert asyncio.run(asked.used_since(before)) == {}


def test_no_more_than_in_flight_at_a_time(server: FakeServer, tmp_path: Path) -> None:
    server.delay_s = 0.001
    run(tmp_path / "out", items(30), in_flight=4)
    assert server.most_in_flight == 4


def test_a_refused_request_is_an_error_record_and_the_rest_goes_on(server: FakeServer, tmp_path: Path) -> None:
    server.errors["prompt 3."] = [RequestError("too long", code="context_length_exceeded")]
    counts = run(tmp_path / "out", items(5))
    assert (counts.succeeded, counts.failed) == (4, 1)
    error = results(tmp_path / "out")["id-3"]["error"]
    assert (error["code"], error["line"]) == ("context_length_exceeded", 3)
    assert error["message"] == "line 3: too long"


def test_a_line_that_the_server_s_job_has_no_time_for_is_left_for_another_run(
    server: FakeServer, tmp_path: Path
) -> None:
    server.errors["prompt 3."] = [RequestError("the job ends in 9 s", code="job_ending")]
    counts = run(tmp_path / "out", items(5))
    assert (counts.succeeded, counts.failed) == (4, 0)
    assert "id-3" not in results(tmp_path / "out")
    assert run(tmp_path / "out", items(5)).succeeded == 1


def test_a_busy_server_is_asked_again(server: FakeServer, tmp_path: Path) -> None:
    server.errors["prompt 1."] = [BusyError("full")] * 5
    counts = run(tmp_path / "out", items(2))
    assert (counts.succeeded, counts.failed) == (2, 0)
    assert len(server.requests) == 7


LOSSES = [EndpointError("lost"), RequestError("draining", code="draining")]


@pytest.mark.parametrize("error", LOSSES)
def test_a_lost_server_ends_the_run_and_a_rerun_finishes_it(
    server: FakeServer, tmp_path: Path, error: EndpointError
) -> None:
    out = tmp_path / "out"
    server.errors["prompt 6."] = [error]
    with pytest.raises(EndpointError):
        run(out, items(10), in_flight=2)
    assert 0 < len(results(out)) < 10
    before = len(server.requests)
    counts = run(out, items(10))
    assert counts.skipped + counts.succeeded == 10
    assert len(server.requests) == before + counts.succeeded
    assert len(out.read_text().splitlines()) == len(results(out)) == 10


@pytest.mark.parametrize("error", LOSSES)
def test_a_server_that_comes_back_in_time_gets_the_lines_again(
    server: FakeServer, tmp_path: Path, error: EndpointError
) -> None:
    server.errors["prompt"] = [error] * 5
    said: list[str] = []
    counts = run(tmp_path / "out", items(10), in_flight=4, reconnect_s=5, say=said.append)
    assert (counts.succeeded, counts.failed, len(results(tmp_path / "out"))) == (10, 0, 10)
    assert said


def test_a_line_that_kills_the_server_each_time_does_not_do_so_for_ever(server: FakeServer, tmp_path: Path) -> None:
    server.errors["prompt 1."] = [EndpointError("lost")] * 100
    with pytest.raises(EndpointError):
        run(tmp_path / "out", items(1), reconnect_s=5)
    assert len(server.errors["prompt 1."]) == 100 - 1 - server_module.MAX_LOSSES


def test_another_model_in_the_server_s_place_is_refused(server: FakeServer, tmp_path: Path) -> None:
    server.errors["prompt 1."] = [EndpointError("lost")]
    server.status = type(server.status)(**{**_fields(server.status), "model": "other"})
    with pytest.raises(ConfigError, match="serves other, but this run is of fake"):
        run(tmp_path / "out", items(1), reconnect_s=5)


def _fields(status: Any) -> dict[str, Any]:
    return {name: getattr(status, name) for name in status.__slots__}


def test_what_an_ending_server_has_cancelled_is_no_result(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cancelled(_prompt: Any, _options: dict[str, Any]) -> list[Event]:
        return [Event(0, "half a", [5], "cancelled", [], [], None)]

    with monkeypatch.context() as patch:
        patch.setattr(server, "answer", cancelled)
        with pytest.raises(EndpointError, match="cancelled what ran"):
            run(tmp_path / "out", items(3))
        assert records(tmp_path / "out") == []
    assert run(tmp_path / "out", items(3)).succeeded == 3


def test_line_errors_are_written_in_passing(tmp_path: Path) -> None:
    bad = LineError(9, None, "invalid_json", "line 9: not JSON")
    counts = run(tmp_path / "out", [*items(2), bad])
    assert (counts.succeeded, counts.failed) == (2, 1)
    assert results(tmp_path / "out")[None]["error"]["line"] == 9
    again = run(tmp_path / "out", [*items(2), bad])
    assert (again.skipped, again.failed, again.all_failed) == (3, 0, 1)


def test_several_choices_are_gathered(tmp_path: Path) -> None:
    run(tmp_path / "out", items(1, n=3))
    choices = results(tmp_path / "out")["id-1"]["response"]["body"]["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]


def test_sampling_fields_are_what_differs_from_the_defaults() -> None:
    params = SamplingParams(max_tokens=5, stop=("x",), logprobs=0)
    assert sampling_fields(params) == {"max_tokens": 5, "stop": ("x",), "logprobs": 0}
    assert sampling_fields(SamplingParams()) == {}


def test_the_summary_has_rates_and_times(tmp_path: Path) -> None:
    summary = run(tmp_path / "out", items(4, max_tokens=3)).summary()
    assert (summary["requests"], summary["failed"], summary["output_tokens"]) == (4, 0, 12)
    assert summary["wall_s"] > 0
    assert summary["output_tokens_per_s"] > 0
    assert set(summary["ttft_s"]) == set(summary["latency_s"]) == {"mean", "p50", "p90", "p95", "p99"}


def test_samples_stay_few_and_even() -> None:
    samples = Samples()
    for i in range(5 * MAX_SAMPLES):
        samples.add(float(i))
    assert len(samples._values) <= MAX_SAMPLES
    median = samples.summary()["p50"]
    assert median == pytest.approx(2.5 * MAX_SAMPLES, rel=0.01)
