from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_client import STATUS

from fastserve_hpc.bench.plan import LoadOptions
from fastserve_hpc.bench.workloads import named
from fastserve_hpc.errors import ConfigError

WIDE = replace(STATUS, max_model_len=2048)


def test_w1_is_64_requests_at_once() -> None:
    run, cut = LoadOptions(workload="w1").run(WIDE)
    assert [(load.due_s, load.prompt_tokens, load.output_tokens) for load in run.loads] == [(0.0, 128, 64)] * 64
    assert (run.one_by_one, cut) == (False, 0)


def test_w2_has_the_agreed_lengths_and_the_same_pattern_at_every_rate() -> None:
    loads = named("w2").loads
    first = [(round(load.due_s, 4), load.prompt_tokens, load.output_tokens) for load in loads[:2]]
    assert first == [(0.0267, 154, 11), (0.3749, 30, 56)]
    assert 40 < statistics.median(load.prompt_tokens for load in loads) < 80
    assert 30 < statistics.median(load.output_tokens for load in loads) < 50
    assert len(loads) / loads[-1].due_s == pytest.approx(5.4, rel=0.2)
    slower = named("w2", rate=2.7).loads
    assert [load.due_s for load in slower] == pytest.approx([2 * load.due_s for load in loads])


def test_w3_is_a_single_stream_unless_asked_otherwise() -> None:
    run, _ = LoadOptions(workload="w3", requests=2).run(WIDE)
    assert run.one_by_one
    assert [(load.prompt_tokens, load.output_tokens) for load in run.loads] == [(128, 128)] * 2
    assert not LoadOptions(workload="w3", offline=True).run(WIDE)[0].one_by_one


def test_named_workloads_warm_up_with_other_prompts_than_they_measure() -> None:
    run, _ = LoadOptions(workload="w1", requests=3, seed=5).run(WIDE)
    assert [load.prompt_tokens for load, _ in run.warm_up] == [len(prompt) for _, prompt in run.warm_up] == [32] * 8
    assert [len(prompt) for prompt in run.prompts] == [128] * 3
    assert run.prompts == LoadOptions(workload="w1", requests=3, seed=5).run(WIDE)[0].prompts
    assert run.prompts != LoadOptions(workload="w1", requests=3, seed=6).run(WIDE)[0].prompts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "--workload w1, w2 or w3, or --trace"),
        ({"workload": "w1", "trace": Path("x")}, "--workload w1, w2 or w3, or --trace"),
        ({"workload": "w2", "offline": True, "rate": 2.0}, "choose one"),
        ({"workload": "w1", "offline": True, "one_by_one": True}, "choose one"),
        ({"workload": "w3", "rate": 2.0}, "the requests of w3 have no times"),
    ],
)
def test_what_excludes_each_other_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoadOptions(**options)
