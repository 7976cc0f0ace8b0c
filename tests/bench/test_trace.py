from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from fastserve_hpc.bench.trace import Load, all_at_once, at_rate, fitted, make_prompts, read_trace, scaled_lengths
from fastserve_hpc.errors import ConfigError

LOADS = [Load(2.0, 10, 5), Load(3.0, 100, 50), Load(6.0, 1, 1)]


def test_a_trace_is_read_and_cut(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"arrival_s":0.0,"prompt_tokens":374,"output_tokens":44}\n'
        '{"arrival_s":4.3,"prompt_tokens":396,"output_tokens":109,"prefix_blocks":[0,1]}\n\n'
    )
    assert read_trace(trace) == [Load(0.0, 374, 44), Load(4.3, 396, 109)]
    assert read_trace(trace, 1) == [Load(0.0, 374, 44)]


@pytest.mark.parametrize("line", ["{", '{"arrival_s": 0}', '{"arrival_s":0,"prompt_tokens":0,"output_tokens":1}', ""])
def test_a_bad_trace_names_the_line(tmp_path: Path, line: str) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(line)
    with pytest.raises(ConfigError, match="line 1" if line else "no requests"):
        read_trace(trace)


def test_at_rate_keeps_the_pattern() -> None:
    paced = at_rate(LOADS, 4.0, seed=0)
    assert [load.due_s for load in paced] == pytest.approx([0.0, 0.125, 0.5])
    assert [load.prompt_tokens for load in paced] == [10, 100, 1]


def test_at_rate_draws_times_where_there_are_none() -> None:
    closed = [Load(0.0, 1, 1)] * 2000
    paced = at_rate(closed, 10.0, seed=3)
    assert paced[-1].due_s == pytest.approx(200, rel=0.1)
    assert paced == at_rate(closed, 10.0, seed=3)
    assert all(a.due_s < b.due_s for a, b in itertools.pairwise(paced))


def test_lengths_are_scaled_and_cut_to_the_context() -> None:
    assert [(x.prompt_tokens, x.output_tokens) for x in scaled_lengths(LOADS, 0.1)] == [(1, 1), (10, 5), (1, 1)]
    fit, cut = fitted([*LOADS, Load(7.0, 100, 500)], 60)
    assert cut == 2
    assert [(x.prompt_tokens, x.output_tokens) for x in fit] == [(10, 5), (30, 30), (1, 1), (30, 30)]
    assert all(x.prompt_tokens + x.output_tokens <= 60 for x in fit)


def test_offline_is_all_at_once() -> None:
    assert {load.due_s for load in all_at_once(LOADS)} == {0.0}


def test_prompts_have_the_exact_length_and_ordinary_ids() -> None:
    prompts = make_prompts(LOADS, 1000, seed=1)
    assert [len(p) for p in prompts] == [10, 100, 1]
    assert all(300 <= token_id < 1000 for p in prompts for token_id in p)
    assert prompts == make_prompts(LOADS, 1000, seed=1) != make_prompts(LOADS, 1000, seed=2)
    assert all(0 <= token_id < 20 for p in make_prompts(LOADS, 20, seed=1) for token_id in p)
