import math

import pytest

from fastserve_hpc.core.request import ModelLimits, SamplingParams, resolve
from fastserve_hpc.errors import RequestError

LIMITS = ModelLimits(vocab_size=100, max_model_len=50, eos_token_ids=(2,))
PROMPT = (5, 6, 7)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", math.nan),
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", math.nan),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", -1e-9),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-38),
        ("repetition_penalty", math.nan),
        ("presence_penalty", 3.0),
        ("frequency_penalty", math.nan),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("n", 0),
        ("n", 65),
        ("seed", 2**63),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("stop", ("",)),
        ("logit_bias", {3: math.nan}),
    ],
)
def test_values_that_make_no_sense_are_named(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value}).validate()


@pytest.mark.parametrize(
    "params", [{"temperature": 1e-4}, {"top_p": 1e-4}, {"top_k": 10**9}, {"seed": -(2**62)}, {"temperature": 0.0}]
)
def test_extreme_but_sound_values_pass(params: dict[str, float]) -> None:
    SamplingParams(**params).validate()
    assert resolve(SamplingParams(**params), PROMPT, LIMITS, 0).max_tokens == 47


def test_no_answer_without_stop_ids_is_possible_if_all_ids_stop() -> None:
    everything = tuple(range(LIMITS.vocab_size))
    assert resolve(SamplingParams(stop_token_ids=everything), PROMPT, LIMITS, 0).min_tokens == 0
    for params in ({"stop_token_ids": everything}, {"stop_token_ids": everything[:2] + everything[3:]}):
        with pytest.raises(RequestError, match="min_tokens is 3, but every token"):
            resolve(SamplingParams(min_tokens=3, **params), PROMPT, LIMITS, 0)


def test_resolve_fills_in_what_depends_on_the_model() -> None:
    resolved = resolve(SamplingParams(stop_token_ids=(9, 4)), PROMPT, LIMITS, default_seed=11)
    assert resolved.max_tokens == 47
    assert resolved.seed == 11
    assert resolved.stop_token_ids == (2, 4, 9)
    assert resolved.temperature == 0.0


def test_several_choices_are_sampled_unless_told_otherwise() -> None:
    assert resolve(SamplingParams(n=4), PROMPT, LIMITS, 0).temperature == 1.0
    assert resolve(SamplingParams(n=4, temperature=0.0), PROMPT, LIMITS, 0).temperature == 0.0


def test_ignore_eos_leaves_only_the_clients_own_stops() -> None:
    assert resolve(SamplingParams(ignore_eos=True, stop_token_ids=(9,)), PROMPT, LIMITS, 0).stop_token_ids == (9,)


@pytest.mark.parametrize("token_id", [-1, 100, 2**62])
@pytest.mark.parametrize("where", ["prompt", "stop_token_ids", "logit_bias"])
def test_ids_outside_the_vocabulary_are_named(token_id: int, where: str) -> None:
    prompt = (1, token_id) if where == "prompt" else PROMPT
    extra = {"stop_token_ids": {"stop_token_ids": (token_id,)}, "logit_bias": {"logit_bias": {token_id: 1.0}}}
    with pytest.raises(RequestError, match=rf"{where}\[\d\] is {token_id}: token ids go from 0 to 99"):
        resolve(SamplingParams(**extra.get(where, {})), prompt, LIMITS, 0)


@pytest.mark.parametrize(
    ("prompt", "params", "text"),
    [
        ((), {}, "prompt is empty"),
        ((1,) * 50, {}, "prompt has 50 tokens, but the context holds 50"),
        (PROMPT, {"max_tokens": 48}, r"prompt \(3 tokens\) \+ max_tokens \(48\) is over .* ask for at most 47"),
        (PROMPT, {"min_tokens": 48}, r"\+ min_tokens \(48\) is over .* ask for at most 47"),
        (PROMPT, {"min_tokens": 5, "max_tokens": 4}, r"at most max_tokens \(4\)"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(
    prompt: tuple[int, ...], params: dict[str, int], text: str
) -> None:
    with pytest.raises(RequestError, match=text):
        resolve(SamplingParams(**params), prompt, LIMITS, 0)
