"""The cost model: what is counted, and what is learnt from what iterations took."""

from __future__ import annotations

import random

import pytest

from fastserve_hpc.core.cost import CostModel, Costs, IterationLoad, load_of, prefill_attention
from fastserve_hpc.core.plan import SequenceSlice

GPU = Costs(0.02, 1.5e-4, 3e-9, 8e-5, 6e-7)


def some_load(rng: random.Random) -> IterationLoad:
    decodes = rng.randint(0, 64)
    prefill = rng.choice([0, 0, rng.randint(2, 2000)])
    start = rng.randint(0, 1000) if prefill else 0
    return IterationLoad(
        prefill, prefill_attention(start, start + prefill), decodes, decodes * rng.randint(1, 900) + start
    )


def test_a_plan_s_load() -> None:
    load = load_of([SequenceSlice(1, 0, 4, 0), SequenceSlice(2, 10, 1, 1), SequenceSlice(3, 4, 2, 1)])
    assert load == IterationLoad(6, (1 + 2 + 3 + 4) + (5 + 6), 1, 11 + 4)


def test_prefill_in_chunks_costs_the_same() -> None:
    assert GPU.prefill_s(0, 700) == pytest.approx(GPU.prefill_s(0, 300) + GPU.prefill_s(300, 700))


def test_an_output_token_bears_its_share_of_the_iteration() -> None:
    assert GPU.output_token_s(16) == pytest.approx(8e-5 + 0.02 / 16)


def test_it_learns_another_machine() -> None:
    rng = random.Random(1)
    model = CostModel()
    for _ in range(400):
        load = some_load(rng)
        model.observe(load, GPU.predict(load) * rng.uniform(0.95, 1.05))
    loads = [some_load(rng) for _ in range(50)]
    errors = [abs(model.costs.predict(load) / GPU.predict(load) - 1) for load in loads]
    assert sum(errors) / 50 < 0.03
    assert model.relative_error is not None
    assert model.relative_error < 0.1
    ratio = model.costs.prefill_token_s / model.costs.output_token_s(16)
    assert ratio == pytest.approx(GPU.prefill_token_s / GPU.output_token_s(16), rel=0.15)


def test_a_batch_that_only_decodes_leaves_the_rest_near_its_prior() -> None:
    model = CostModel(GPU)
    for _ in range(500):
        model.observe(IterationLoad(0, 0, 16, 16 * 400), 0.05)
    assert model.costs.predict(IterationLoad(0, 0, 16, 16 * 400)) == pytest.approx(0.05, rel=0.02)
    assert model.costs.prefill_token_s == pytest.approx(GPU.prefill_token_s, rel=0.01)


def test_coefficients_stay_positive_and_stalls_count_little() -> None:
    rng = random.Random(2)
    model = CostModel(GPU)
    for i in range(600):
        load = some_load(rng)
        model.observe(load, 30.0 if i % 50 == 49 else GPU.predict(load))
    load = IterationLoad(0, 0, 16, 8000)
    assert model.costs.predict(load) == pytest.approx(GPU.predict(load), rel=0.25)
    assert min(vars_of(model.costs)) > 0


def test_no_time_is_no_measurement() -> None:
    model = CostModel(GPU)
    model.observe(IterationLoad(0, 0, 1, 1), 0.0)
    assert (model.costs, model.num_observed, model.relative_error) == (GPU, 0, None)


def vars_of(costs: Costs) -> list[float]:
    return [getattr(costs, name) for name in Costs.__slots__]
