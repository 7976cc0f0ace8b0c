"""Hardware, shapes, lengths, workloads and hints."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean, stdev

import pytest

from fastserve_hpc.core.cost import Costs, IterationLoad
from fastserve_hpc.errors import ConfigError, ModelError
from fastserve_hpc.sim.hardware import HARDWARE, as_measured, find_hardware
from fastserve_hpc.sim.lengths import SHAREGPT, find_lengths
from fastserve_hpc.sim.shapes import SHAPES, find_shape
from fastserve_hpc.sim.workload import Arrival, DrawnSource, Gaps, Hints, TraceSource, read_trace


class TestHardware:
    @pytest.mark.parametrize(
        ("model", "billions"),
        [("opt-13b", 12.9), ("opt-66b", 65.7), ("opt-175b", 174.6), ("llama-3-8b", 7.5), ("llama-3-70b", 69.5)],
    )
    def test_shapes_have_their_names_size(self, model: str, billions: float) -> None:
        assert SHAPES[model].num_parameters / 1e9 == pytest.approx(billions, rel=0.02)

    def test_one_decode_of_opt_13b_takes_what_was_measured(self) -> None:
        costs = HARDWARE["a100-40g"].costs(SHAPES["opt-13b"])
        assert 0.020 < costs.predict(IterationLoad(0, 0, 1, 200)) < 0.026

    def test_more_ranks_are_faster_but_not_for_free(self) -> None:
        hardware, shape = HARDWARE["a100-80g"], SHAPES["llama-3-70b"]
        one, four = hardware.costs(shape, tp=1), hardware.costs(shape, tp=4)
        assert one.fixed_s / 4 < four.fixed_s < one.fixed_s / 2
        assert one.prefill_token_s / 4 < four.prefill_token_s < one.prefill_token_s / 2

    def test_room_for_kv(self) -> None:
        assert 11_000 < HARDWARE["a100-40g"].kv_tokens(SHAPES["opt-13b"]) < 15_000
        with pytest.raises(ConfigError, match=r"opt-66b has 131 GB of weights, but 1 x a100-80g hold 74 GB.*--tp"):
            HARDWARE["a100-80g"].kv_tokens(SHAPES["opt-66b"])

    def test_hardware_from_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "ours.json"
        path.write_text(json.dumps({"flops": 1e12, "memory_bandwidth": 5e10, "memory_bytes": 64e9, "overhead_s": 0.01}))
        assert (find_hardware(str(path)).name, find_hardware(str(path)).overhead_s) == ("ours", 0.01)
        path.write_text("{}")
        with pytest.raises(ConfigError, match=r"ours.json"):
            find_hardware(str(path))
        with pytest.raises(ConfigError, match=r"--hardware tpu: use a100-40g.*or a JSON file"):
            find_hardware("tpu")

    def test_a_shape_from_config_json(self, tmp_path: Path) -> None:
        config = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 3}
        (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 100, "vocab_size": 50}))
        shape = find_shape(str(tmp_path))
        assert shape == find_shape(str(tmp_path / "config.json"))
        assert shape.num_parameters == 3 * (64 * 8 * 2 * 10 + 3 * 64 * 100) + 50 * 64
        assert shape.kv_bytes_per_token == 2 * 3 * 2 * 8 * 2
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(ModelError, match="config.json: not the config.json of a decoder: KeyError"):
            find_shape(str(tmp_path))
        with pytest.raises(ModelError, match=r"--model gpt-5: no such shape; use opt-13b"):
            find_shape("gpt-5")


class TestLengths:
    def test_sharegpt_has_its_means(self) -> None:
        rng = Random(1)
        pairs = [SHAREGPT.draw(rng) for _ in range(20_000)]
        assert fmean(prompt for prompt, _ in pairs) == pytest.approx(119, rel=0.05)
        assert fmean(output for _, output in pairs) == pytest.approx(338, rel=0.05)
        assert 1 == min(min(pair) for pair in pairs) < 4 <= min(max(pair) for pair in pairs)
        assert max(sum(pair) for pair in pairs) <= 2048

    def test_quantiles_of_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "q.json"
        path.write_text(json.dumps({"input_q0_100": [10, 10], "output_q0_100": [1, 3, 100], "max_total": 60}))
        lengths, rng = find_lengths(str(path)), Random(1)
        pairs = [lengths.draw(rng) for _ in range(2000)]
        assert {prompt for prompt, _ in pairs} == {10}
        assert max(output for _, output in pairs) == 50
        for wrong in ({}, {"input_q0_100": [2, 1], "output_q0_100": [1, 2]}, {"input_q0_100": 3}):
            path.write_text(json.dumps(wrong))
            with pytest.raises(ConfigError, match="q.json"):
                find_lengths(str(path))


def trace_file(tmp_path: Path, times: list[float]) -> Path:
    path = tmp_path / "trace.jsonl"
    rows = ({"arrival_s": time, "prompt_tokens": 10 + i, "output_tokens": 5} for i, time in enumerate(times))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class TestWorkloads:
    @pytest.mark.parametrize("variation", [0.5, 1.0, 3.0])
    def test_drawn_gaps_have_rate_and_variation(self, variation: float) -> None:
        arrivals = DrawnSource(SHAREGPT, Gaps(variation)).draw(20_000, 5.0, Random(2))
        times = [arrival.arrival_s for arrival in arrivals]
        gaps = [b - a for a, b in pairwise(times)]
        assert fmean(gaps) == pytest.approx(0.2, rel=0.1)
        assert stdev(gaps) / fmean(gaps) == pytest.approx(variation, rel=0.1)

    def test_the_same_seed_draws_the_same(self) -> None:
        source = DrawnSource(SHAREGPT)
        assert source.draw(50, 1.0, Random(3)) == source.draw(50, 1.0, Random(3)) != source.draw(50, 1.0, Random(4))

    def test_a_stretch_of_a_trace_at_another_rate_keeps_its_bursts(self, tmp_path: Path) -> None:
        source = TraceSource(read_trace(trace_file(tmp_path, [0, 1, 2, 10, 11, 30])))
        arrivals = source.draw(6, 2.0, Random(1))
        assert [arrival.arrival_s for arrival in arrivals] == pytest.approx([t / 12 for t in (0, 1, 2, 10, 11, 30)])
        part = source.draw(3, 2.0, Random(1))
        assert part[0].arrival_s == 0
        assert part[-1].arrival_s == pytest.approx(1.0)
        assert part[1].prompt_tokens == part[0].prompt_tokens + 1
        with pytest.raises(ConfigError, match="--requests 7: the trace has only 6"):
            source.draw(7, 1.0, Random(1))

    def test_times_in_steps_are_spread(self, tmp_path: Path) -> None:
        rows = read_trace(trace_file(tmp_path, [0.0] * 30 + [3.0] * 30 + [6.0] * 30))
        times = [arrival.arrival_s for arrival in TraceSource(rows).draw(90, 10.0, Random(1))]
        assert len(set(times)) == 90
        assert times == sorted(times)
        assert 25 <= sum(time < times[-1] / 3 for time in times) <= 35

    def test_a_trace_without_times_is_drawn_from(self, tmp_path: Path) -> None:
        source = TraceSource(read_trace(trace_file(tmp_path, [0.0] * 5), prompt_scale=2.0, output_scale=0.5))
        arrivals = source.draw(300, 3.0, Random(1))
        assert {arrival.prompt_tokens for arrival in arrivals} == {20, 22, 24, 26, 28}
        assert {arrival.output_tokens for arrival in arrivals} == {2}
        assert arrivals[-1].arrival_s == pytest.approx(100, rel=0.3)

    def test_what_is_wrong_in_a_trace_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "trace.jsonl"
        good = '{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}\n'
        for line in ("{}", "[]", "x", '{"arrival_s": -1, "prompt_tokens": 1, "output_tokens": 1}'):
            path.write_text(good + line + "\n")
            with pytest.raises(ConfigError, match=r"trace.jsonl, line 2: "):
                read_trace(path)
        path.write_text("\n")
        with pytest.raises(ConfigError, match="no requests"):
            read_trace(path)


class TestHints:
    arrivals = [Arrival(0.0, 1, length) for length in range(10, 1010)]

    def put(self, text: str) -> list[float]:
        hinted = Hints(text).put(self.arrivals, Random(1))
        return [arrival.hint / arrival.output_tokens for arrival in hinted if arrival.hint is not None]

    def test_kinds(self) -> None:
        assert self.put("none") == []
        assert set(self.put("exact")) == {1.0}
        noisy = self.put("noisy:0.5")
        assert 0.45 <= min(noisy) < 0.6
        assert 1.4 < max(noisy) <= 1.55
        assert self.put("scaled:0.25") == pytest.approx([0.25] * 1000, rel=0.25)
        assert {round(math_sign, 0) for math_sign in (ratio > 1 for ratio in self.put("wrong:4"))} == {0, 1}
        shuffled = Hints("shuffled").put(self.arrivals, Random(1))
        assert sorted(arrival.hint or 0 for arrival in shuffled) == list(range(10, 1010))

    @pytest.mark.parametrize("text", ["", "right", "noisy", "noisy:x", "exact:2", "wrong:-1", "scaled:nan"])
    def test_senseless_ones(self, text: str) -> None:
        with pytest.raises(ConfigError, match="--hints .*use none, exact"):
            Hints(text)


def test_hardware_as_measured_takes_as_long() -> None:
    shape, cpu = SHAPES["smollm2-135m"], HARDWARE["cpu"]
    measured = Costs(6e-3, 5e-4, 2e-8, 4e-4, 8e-7)
    found = as_measured(cpu, measured, shape.weight_bytes, shape.num_parameters, shape.kv_bytes_per_token)
    costs = found.costs(shape)
    for name in ("prefill_token_s", "decode_sequence_s", "kv_token_s"):
        assert getattr(costs, name) == pytest.approx(getattr(measured, name), rel=0.01), name
    assert costs.fixed_s == pytest.approx(measured.fixed_s, rel=0.6)
