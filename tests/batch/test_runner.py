from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from fake_client import FakeAsyncClient, FakeServer

from fastserve_hpc.batch import runner as runner_module
from fastserve_hpc.batch.reader import BatchItem, LineError
from fastserve_hpc.batch.runner import BatchRunner, sampling_fields
from fastserve_hpc.batch.summary import Counts
from fastserve_hpc.batch.writer import ResultWriter
from fastserve_hpc.core.request import SamplingParams
from fastserve_hpc.errors import BusyError, EndpointError, RequestError
from fastserve_hpc.openai.bodies import parse_body


class Silent:
    def update(self, counts: Counts) -> None:
        self.last = counts.finished


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    server = FakeServer()
    monkeypatch.setattr(FakeAsyncClient, "server", server)
    return server


def items(count: int, **fields: Any) -> list[BatchItem | LineError]:
    return [
        BatchItem(i, f"id-{i}", parse_body("completion", {"prompt": f"prompt {i}.", **fields}))
        for i in range(1, count + 1)
    ]


def run(out: Path, todo: list[BatchItem | LineError], in_flight: int = 8, resume: bool = False) -> Counts:
    progress = Silent()
    with ResultWriter(out, "resume" if resume else "overwrite") as writer:
        runner = BatchRunner(FakeAsyncClient(), "fake", writer, progress, in_flight)
        return asyncio.run(runner.run(todo))


def results(out: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    return {line["custom_id"]: line for line in lines}


def test_every_item_is_answered_as_class_batch(server: FakeServer, tmp_path: Path) -> None:
    counts = run(tmp_path / "out", items(20, max_tokens=2, seed=5))
    assert (counts.succeeded, counts.failed, counts.output_tokens) == (20, 0, 40)
    assert results(tmp_path / "out")["id-7"]["response"]["body"]["choices"][0]["text"] == "echo prompt"
    assert all(r["service_class"] == "batch" and r["seed"] == 5 for r in server.requests)


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
    assert "too long" in error["message"]


def test_a_busy_server_is_asked_again(server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "BUSY_WAIT_S", (0.001, 0.01))
    server.errors["prompt 1."] = [BusyError("full")] * 5
    counts = run(tmp_path / "out", items(2))
    assert (counts.succeeded, counts.failed) == (2, 0)
    assert len(server.requests) == 7


@pytest.mark.parametrize("error", [EndpointError("lost"), RequestError("draining", code="draining")])
def test_a_lost_server_ends_the_run_and_resume_finishes_it(
    server: FakeServer, tmp_path: Path, error: EndpointError
) -> None:
    out = tmp_path / "out"
    server.errors["prompt 6."] = [error]
    with pytest.raises(EndpointError):
        run(out, items(10), in_flight=2)
    assert 0 < len(results(out)) < 10
    before = len(server.requests)
    counts = run(out, items(10), resume=True)
    assert counts.skipped + counts.succeeded == 10
    assert len(server.requests) == before + counts.succeeded
    assert len(out.read_text().splitlines()) == len(results(out)) == 10


def test_line_errors_are_written_in_passing(tmp_path: Path) -> None:
    bad = LineError(9, None, "invalid_json", "line 9: not JSON")
    counts = run(tmp_path / "out", [*items(2), bad])
    assert (counts.succeeded, counts.failed) == (2, 1)
    assert results(tmp_path / "out")[None]["error"]["line"] == 9  # type: ignore[index]


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
