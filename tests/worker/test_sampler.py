"""The sampler against an independent row-by-row reference, its statistics, and its edges."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worker import sampling_reference as reference

from fastserve_hpc.core.request import SamplingParams
from fastserve_hpc.worker.draw import draw, draw_all
from fastserve_hpc.worker.philox import uniform
from fastserve_hpc.worker.sample_row import NO_TOKEN, SampleRow
from fastserve_hpc.worker.sampler import sample

VOCAB = 50
GREEDY = SamplingParams(temperature=0.0, seed=0)


def row(params: SamplingParams, prompt: list[int] | None = None, output: list[int] | None = None) -> SampleRow:
    prompt = [1, 2, 3] if prompt is None else prompt
    return SampleRow(params, 0, len(prompt), np.array(prompt + (output or []), np.int32))


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def choose(logits: torch.Tensor, rows: list[SampleRow]) -> list[int]:
    return sample(logits.clone(), rows).token_ids


sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 2, 7, VOCAB - 1, VOCAB, 10**6]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.1, 1e-4]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.8, -0.5]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-20, 20), max_size=4),
    min_tokens=st.sampled_from([0, 0, 3]),
    stop_token_ids=st.just((4, 9)),
    seed=st.integers(-(2**63) + 1, 2**63 - 1),
)
token_lists = st.lists(st.integers(0, VOCAB - 1), max_size=8)
sample_rows = st.builds(
    lambda params, choice, prompt, output: SampleRow(
        params, choice, len(prompt) + 1, np.array([0, *prompt, *output], np.int32)
    ),
    sampling_params,
    st.integers(0, 63),
    token_lists,
    token_lists,
)


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(sample_rows, min_size=1, max_size=6), seed=st.integers(0, 2**31))
def test_every_row_is_chosen_as_the_reference_says(rows: list[SampleRow], seed: int) -> None:
    logits = random_logits(len(rows), seed)
    for token_id, one, raw in zip(choose(logits, rows), rows, logits.tolist(), strict=True):
        params = one.sampling
        prompt, output = one.record[: one.num_prompt_tokens].tolist(), one.output.tolist()
        expected = reference.edited(raw, params, prompt, output)
        if one.is_greedy:
            assert expected[token_id] >= expected.max() - 1e-5
        else:
            (number,) = uniform([params.seed or 0], [one.choice], [len(one.record)]).tolist()
            assert token_id in reference.drawn(reference.distribution(expected, params), number)


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(sample_rows, min_size=2, max_size=8), seed=st.integers(0, 2**31), data=st.data())
def test_a_rows_token_does_not_depend_on_its_neighbours(rows: list[SampleRow], seed: int, data: st.DataObject) -> None:
    logits = random_logits(len(rows), seed, vocab=1000)
    together = choose(logits, rows)
    order = data.draw(st.permutations(range(len(rows))))[: data.draw(st.integers(1, len(rows)))]
    assert choose(logits[order], [rows[i] for i in order]) == [together[i] for i in order]


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(sample_rows, min_size=1, max_size=8), seed=st.integers(0, 2**31), vocab=st.sampled_from([50, 999]))
def test_both_ways_to_draw_give_the_same_tokens(rows: list[SampleRow], seed: int, vocab: int) -> None:
    rows = [one._replace(sampling=replace(one.sampling, temperature=1.1)) for one in rows]
    logits = random_logits(len(rows), seed, vocab)
    params = [one.sampling for one in rows]
    numbers = uniform([p.seed or 0 for p in params], [r.choice for r in rows], [len(r.record) for r in rows])
    weights = torch.softmax(logits / torch.tensor(1.1), dim=-1)
    assert draw(logits, rows).tolist() == draw_all(weights, params, numbers).tolist()


def test_a_rows_token_does_not_depend_on_its_neighbours_in_a_real_vocabulary() -> None:
    logits = random_logits(24, vocab=49_152)
    plain = SamplingParams(temperature=1.0)
    variants = [
        plain,
        replace(plain, top_p=0.9),
        replace(plain, top_k=40),
        replace(plain, min_p=0.02),
        replace(plain, top_p=0.99, top_k=5000),
    ]
    rows = [row(replace(variants[i % 5], seed=i)) for i in range(24)]
    assert choose(logits, rows) == [choose(logits[i : i + 1], [rows[i]])[0] for i in range(24)]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(temperature=0.6, top_k=12, seed=4),
        SamplingParams(temperature=1.4, top_p=0.8, seed=5),
        SamplingParams(temperature=1.0, min_p=0.1, seed=6),
        SamplingParams(temperature=1.2, top_k=20, top_p=0.9, min_p=0.02, seed=7),
        SamplingParams(temperature=0.9, repetition_penalty=1.4, presence_penalty=0.5, logit_bias={7: 2.0}, seed=8),
    ],
    ids=lambda p: f"seed{p.seed}",
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    """Chi-square over 5,000 positions, at a fixed seed."""
    count, prompt = 5_000, [1, 2, 3, 7]
    logits = random_logits(1, seed=11, scale=1.0)
    record = np.array(prompt + [7] * count, np.int32)
    rows = [SampleRow(params, 0, len(prompt), record[: len(prompt) + i]) for i in range(count)]
    if params.repetition_penalty != 1.0:  # the reference's one distribution needs a record that stays as it is
        rows = [SampleRow(replace(params, seed=i), 0, 2, record[:4]) for i in range(count)]
    edited = reference.edited(logits[0].tolist(), params, prompt[:2], prompt[2:])
    expected = reference.distribution(edited, params) * count
    drawn = np.bincount(choose(logits.expand(count, -1), rows), minlength=VOCAB)
    assert not drawn[expected == 0].any()
    big = expected >= 5
    observed = np.append(drawn[big], drawn[~big].sum())
    wanted = np.append(expected[big], expected[~big].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    assert len(wanted) > 4
    chi_square = float(((observed - wanted) ** 2 / wanted).sum())
    assert chi_square < _chi_square_quantile(len(wanted) - 1)


def _chi_square_quantile(degrees: int, z: float = 3.7) -> float:
    """Wilson-Hilferty's approximation; z 3.7 is the 0.9999 quantile."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + z * math.sqrt(spread)) ** 3


@pytest.mark.parametrize("number", [0.0, 1 - 2**-24])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_extreme_numbers_give_the_first_and_last_token_that_is_kept(
    monkeypatch: pytest.MonkeyPatch, number: float, top_p: float
) -> None:
    """Many sums, so that every way in which number * total may round occurs."""
    count = 400
    monkeypatch.setattr("fastserve_hpc.worker.draw.uniform", lambda *_: np.full(count, number, np.float32))
    logits = random_logits(count, vocab=40, scale=0.2)
    logits[:, [0, 39]] = -math.inf
    logits[:, [1, 38]] = -2.0  # the least likely: top_p drops them
    logits[:, [2, 37]] = 3.0
    first, last = (1, 38) if top_p == 1.0 else (2, 37)
    rows = [row(SamplingParams(temperature=1.0, top_p=top_p, seed=0))] * count
    assert set(choose(logits, rows)) == {first if number == 0.0 else last}


def test_choices_of_one_seed_differ_and_repeat() -> None:
    params = SamplingParams(temperature=1.0, seed=42, n=4)
    logits = random_logits(1, vocab=1000, scale=1.0).expand(32, -1)
    record = np.arange(8, dtype=np.int32)
    rows = [SampleRow(params, i // 8, 1, record[: i % 8 + 1]) for i in range(32)]
    first = choose(logits, rows)
    answers = {tuple(first[start : start + 8]) for start in range(0, 32, 8)}
    assert len(answers) == 4
    assert choose(logits, rows) == first


def test_draws_are_the_same_in_every_release() -> None:
    """A recorded answer: a change here changes what every seed gives."""
    rows = [row(SamplingParams(temperature=1.0, seed=seed)) for seed in range(8)]
    logits = torch.linspace(-2, 2, VOCAB)[None].expand(8, -1)
    assert choose(logits, rows) == [47, 46, 30, 27, 19, 45, 44, 38]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1e-4),
        SamplingParams(temperature=1e-7),
        SamplingParams(temperature=1.0, top_p=1e-4),
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=100.0, top_k=1),
        SamplingParams(temperature=1.0, min_p=1.0),
    ],
    ids=lambda p: f"temperature {p.temperature} top_p {p.top_p} top_k {p.top_k} min_p {p.min_p}",
)
def test_settings_that_leave_one_token_are_greedy(params: SamplingParams) -> None:
    logits = random_logits(32, vocab=1000)
    rows = [row(replace(params, seed=i)) for i in range(32)]
    assert choose(logits, rows) == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize(("scale", "temperature"), [(1e3, 1e-5), (1e4, 1e-4), (1e30, 1e-5), (1e30, 100.0)])
def test_extreme_logits_and_temperatures_stay_finite(scale: float, temperature: float) -> None:
    logits = random_logits(8) * scale
    rows = [row(SamplingParams(temperature=temperature, top_p=0.9, seed=i)) for i in range(8)]
    assert choose(logits, rows) == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("top_k", [0, VOCAB, VOCAB + 1, 2**40])
def test_top_k_over_the_vocabulary_is_no_limit(top_k: int) -> None:
    logits = random_logits(64)
    unlimited = choose(logits, [row(SamplingParams(temperature=1.0, seed=i)) for i in range(64)])
    assert choose(logits, [row(SamplingParams(temperature=1.0, seed=i, top_k=top_k)) for i in range(64)]) == unlimited


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [30, 8, 44]] = 2.0
    assert choose(logits, [row(GREEDY)]) == [8]


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, [5, 17]] = torch.tensor([0.0, 1.0])
    drawn = {choose(logits, [row(SamplingParams(temperature=1.0, seed=i, top_p=0.999))])[0] for i in range(50)}
    assert drawn == {5, 17}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0, seed=1, top_p=0.9, logprobs=2)])
def test_logits_that_are_not_numbers_spoil_their_row_only(value: float, params: SamplingParams) -> None:
    logits = random_logits(3)
    rows = [row(params)] * 3
    good = choose(logits, rows)
    logits[1, 20] = value
    samples = sample(logits.clone(), rows)
    assert samples.token_ids == [good[0], NO_TOKEN, good[2]]
    assert samples.logprobs[1] is None


def test_no_token_where_everything_is_masked() -> None:
    everything = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=tuple(range(VOCAB)))
    assert choose(random_logits(1), [row(everything)]) == [NO_TOKEN]


def test_stop_ids_come_only_after_min_tokens() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(6,))
    logits = torch.zeros(3, VOCAB)
    logits[:, 6], logits[:, 8] = 5.0, 4.0
    rows = [row(params, output=[]), row(params, output=[1]), row(params, output=[1, 1])]
    assert choose(logits, rows) == [8, 8, 6]


def test_presence_and_frequency_see_the_output_only_repetition_sees_the_prompt() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 8] = 1.0, 0.9
    prompt = [7, 7]
    presence = SamplingParams(temperature=0.0, presence_penalty=2.0)
    assert choose(logits, [row(presence, prompt)]) == [7]
    assert choose(logits, [row(presence, prompt, [7])]) == [8]
    frequency = SamplingParams(temperature=0.0, frequency_penalty=0.06)
    assert choose(logits, [row(frequency, prompt, [7])]) == [7]
    assert choose(logits, [row(frequency, prompt, [7, 7])]) == [8]
    assert choose(logits, [row(SamplingParams(temperature=0.0, repetition_penalty=1.2), prompt)]) == [8]


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = random_logits(2)
    params = SamplingParams(temperature=0.0, logit_bias={3: 100.0}, repetition_penalty=1.5, logprobs=2)
    samples = sample(logits.clone(), [row(params, [3]), row(GREEDY)])
    (entry, none) = samples.logprobs
    expected = torch.log_softmax(logits[0].double(), dim=-1)
    assert none is None
    assert entry is not None
    assert entry.token_id == samples.token_ids[0] == 3
    assert entry.logprob == pytest.approx(expected[3].item(), abs=1e-5)
    assert [token_id for token_id, _ in entry.top] == expected.topk(2).indices.tolist()


def test_no_sampled_row_changes_the_logits_it_was_not_given() -> None:
    logits = random_logits(4)
    before = logits.clone()
    sample(logits[1:3], [row(SamplingParams(temperature=0.0, logit_bias={0: 9.0}))] * 2)
    assert torch.equal(logits[[0, 3]], before[[0, 3]])
