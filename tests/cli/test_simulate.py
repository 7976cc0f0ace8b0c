"""The simulate command: its options, its JSON, its complaints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fastserve_hpc.cli import main

QUICK = ("simulate", "--lengths", "sharegpt", "--requests", "20", "--kv-tokens", "ample")


def simulate(*args: str) -> Result:
    return CliRunner().invoke(main, [*QUICK, *args])


def test_json_has_a_point_for_each_combination() -> None:
    done = simulate("--policy", "fcfs,skip-join", "--rate", "1,3", "--seeds", "2", "--json")
    assert done.exit_code == 0
    points = json.loads(done.output)["points"]
    assert len(points) == 8
    assert {(p["policy"], p["rate"], p["seed"]) for p in points} == {
        (policy, rate, seed) for policy in ("fcfs", "skip-join") for rate in (1.0, 3.0) for seed in (0, 1)
    }
    assert all(p["kv_policy"] == "recompute" and p["load"] is None for p in points)
    assert all(p["normalized_latency_s"]["mean"] > 0 for p in points)


def test_a_trace_and_a_table(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    row = {"prompt_tokens": 40, "output_tokens": 9}
    trace.write_text("".join(json.dumps({"arrival_s": i / 3, **row}) + "\n" for i in range(30)))
    options = ("--hardware", "h100", "--model", "llama-3-8b", "--trace", str(trace), "--load", "0.5")
    done = CliRunner().invoke(main, ["simulate", "--requests", "30", "--policy", "fcfs", *options])
    assert done.exit_code == 0, done.output
    header, line = done.output.splitlines()
    assert header.split()[0] == "policy"
    assert line.split()[:2] == ["fcfs", "recompute"]


def test_a_figure(tmp_path: Path) -> None:
    path = tmp_path / "curves.png"
    assert simulate("--policy", "fcfs,mlfq", "--rate", "1,3", "--figure", str(path)).exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "give either --rate"),
        (("--rate", "1", "--load", "1"), "give either --rate"),
        (("--rate", "1", "--policy", "best"), "--policy best: this version has fcfs"),
        (("--rate", "1", "--policy", ","), "--policy: name at least one"),
        (
            ("--rate", "1", "--kv-policy", "swap"),
            "--kv-policy swap: this version has proactive, reactive",
        ),
        (("--rate", "1", "--hints", "good"), "--hints good: use none"),
        (("--rate", "1", "--arrivals", "gamma:0"), "--arrivals gamma:0: use trace"),
        (("--rate", "1", "--arrivals", "trace"), "--lengths have no times"),
        (("--rate", "1", "--kv-tokens", "7"), "--kv-tokens 7"),
        (("--rate", "0"), "all must be above 0"),
        (("--rate", "fast"), "not a list of numbers"),
    ],
)
def test_what_does_not_fit_is_said(args: tuple[str, ...], message: str) -> None:
    done = simulate(*args)
    assert done.exit_code == 2
    assert message in done.output
