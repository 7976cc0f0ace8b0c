"""What a client asked for: the immutable request and its sampling parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from fastserve_hpc.errors import RequestError

ServiceClass = Literal["interactive", "batch"]
FinishReason = Literal["stop", "length", "cancelled", "error"]

MAX_CHOICES = 64
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_SEED = 2**63 - 1
DEFAULT_SLOWDOWN = 2.0
"""What a request of class `batch` that says nothing else may cost interactive ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose the next token. Field names and meanings follow the OpenAI and vLLM APIs.

    `max_tokens` None means: as many as the context still holds. `temperature` 0 is greedy; None is
    greedy for one choice and 1.0 for several. `top_k` 0 means no limit. `logprobs` k returns the
    sampled token's log-probability and the k most likely ones, from the raw logits (before
    temperature and penalties).
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_from: int = 0
    """`prompt_logprobs` begin at this position of the prompt, whose own entry is None."""
    cache_prefix: bool = True
    """Whether the KV of its tokens is shared with requests that begin alike, before and after it."""

    def validate(self) -> None:
        """Raise `RequestError` naming the first value that makes no sense for any model."""
        self._check_numbers()
        self._check_counts()
        _require(all(self.stop), "stop", list(self.stop), "non-empty strings")
        _require(len(self.stop) <= MAX_STOP_STRINGS, "stop", len(self.stop), f"at most {MAX_STOP_STRINGS} strings")

    def _check_numbers(self) -> None:
        ranges = (
            ("temperature", self.temperature or 0.0, 0.0, 100.0),
            ("top_p", self.top_p, 0.0, 1.0),
            ("min_p", self.min_p, 0.0, 1.0),
            ("repetition_penalty", self.repetition_penalty, 0.01, 100.0),  # nearer to 0 logits would overflow
            ("presence_penalty", self.presence_penalty, -2.0, 2.0),
            ("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
        )
        for name, value, low, high in ranges:
            _require(low <= value <= high, name, value, f"between {low:g} and {high:g}")
        _require(self.top_p > 0, "top_p", self.top_p, "above 0; use temperature 0 for greedy")
        for token_id, bias in self.logit_bias.items():
            _require(math.isfinite(bias) and abs(bias) <= 100, f"logit_bias[{token_id}]", bias, "between -100 and 100")

    def _check_counts(self) -> None:
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "at least 0")
        ordered = self.max_tokens is None or self.min_tokens <= self.max_tokens
        _require(ordered, "min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        _require(self.top_k >= 0, "top_k", self.top_k, "at least 0 (0 means no limit)")
        _require(self.prompt_logprobs_from >= 0, "prompt_logprobs_from", self.prompt_logprobs_from, "at least 0")
        _require(1 <= self.n <= MAX_CHOICES, "n", self.n, f"between 1 and {MAX_CHOICES}")
        _require(self.seed is None or abs(self.seed) <= MAX_SEED, "seed", self.seed, "a signed 64-bit integer")
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            _require(count is None or 0 <= count <= MAX_LOGPROBS, name, count, f"between 0 and {MAX_LOGPROBS}")


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate. A client request with `n` choices becomes n of these.

    The front end has already resolved what depends on the model: `prompt` is token ids, all in
    the vocabulary; `sampling.max_tokens` is a number that fits the context; `sampling.seed` is
    set; `sampling.stop_token_ids` holds the end-of-sequence ids too unless `ignore_eos`.
    """

    request_id: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    choice: int = 0
    service_class: ServiceClass = "interactive"
    session: str | None = None
    """Requests of one session share their service account."""
    expected_tokens: int | None = None
    """The client's hint of the output length; trusted only as far as hints have been right."""
    slowdown: float | None = None
    """Of class `batch`: interactive requests may take so many times as long because of it. None: the usual."""
    num_cut: int = 0
    """Tokens of a context to be scored that did not fit and were cut off its beginning."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a front end must know of the model to judge a request."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]


def resolve(
    sampling: SamplingParams, prompt: tuple[int, ...], limits: ModelLimits, default_seed: int
) -> SamplingParams:
    """The parameters with everything that depends on prompt and model filled in.

    Raises `RequestError` where the prompt does not fit, an id is outside the vocabulary or a value makes no sense.
    """
    sampling.validate()
    check_token_ids("prompt", prompt, limits.vocab_size)
    check_token_ids("stop_token_ids", sampling.stop_token_ids, limits.vocab_size)
    check_token_ids("logit_bias", tuple(sampling.logit_bias), limits.vocab_size)
    eos = () if sampling.ignore_eos else limits.eos_token_ids
    stop_token_ids = {*sampling.stop_token_ids, *eos}
    if sampling.min_tokens > 0 and len(stop_token_ids) == limits.vocab_size:
        raise RequestError(f"min_tokens is {sampling.min_tokens}, but every token of the vocabulary is a stop token id")
    temperature = sampling.temperature
    return replace(
        sampling,
        max_tokens=_resolved_max_tokens(sampling, len(prompt), limits.max_model_len),
        temperature=float(sampling.n > 1) if temperature is None else temperature,
        seed=default_seed if sampling.seed is None else sampling.seed,
        stop_token_ids=tuple(sorted(stop_token_ids)),
    )


def _resolved_max_tokens(sampling: SamplingParams, num_prompt_tokens: int, max_model_len: int) -> int:
    room = max_model_len - num_prompt_tokens
    if num_prompt_tokens < 1:
        raise RequestError("the prompt is empty: it must have at least 1 token")
    if room < 1:
        raise RequestError(
            f"the prompt has {num_prompt_tokens} tokens, but the context holds {max_model_len} with at least "
            "1 left for the answer: shorten the prompt or serve with a larger --max-model-len",
            code="context_length_exceeded",
        )
    for name, wanted in (("max_tokens", sampling.max_tokens or 0), ("min_tokens", sampling.min_tokens)):
        if wanted > room:
            raise RequestError(
                f"prompt ({num_prompt_tokens} tokens) + {name} ({wanted}) is over the context of {max_model_len}: "
                f"ask for at most {room}",
                code="context_length_exceeded",
            )
    return room if sampling.max_tokens is None else sampling.max_tokens


def check_token_ids(name: str, token_ids: tuple[int, ...], vocab_size: int) -> None:
    """Raise `RequestError` naming the first id outside the vocabulary."""
    for position, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"{name}[{position}] is {token_id}: token ids go from 0 to {vocab_size - 1}")


def _require(holds: bool, name: str, value: object, rule: str) -> None:
    # A comparison with NaN is false, so NaN fails every range above.
    if not holds:
        raise RequestError(f"{name} is {value}: it must be {rule}")
