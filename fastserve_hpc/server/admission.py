"""From what a client sent to requests that the engine can take, or a refusal that says why."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from fastserve_hpc.core.request import MAX_SEED, ModelLimits, Request, SamplingParams, resolve
from fastserve_hpc.errors import RequestError
from fastserve_hpc.models.tokenizer import Tokenizer
from fastserve_hpc.protocol import Submit
from fastserve_hpc.server.scoring import pair_of

MAX_STOP_LENGTH = 1000
MAX_SESSION_LENGTH = 256


class Admission:
    """Tokenises, checks, and gives each choice a request id of its own."""

    def __init__(self, model: str, tokenizer: Tokenizer, limits: ModelLimits, seed: int) -> None:
        self.model = model
        self.limits = limits
        self._tokenizer = tokenizer
        self._seed = seed
        self._num_submits = 0
        self._next_id = 1

    def admit(self, submit: Submit) -> list[Request]:
        """One request a choice. Raises `RequestError`."""
        self._check(submit)
        if submit.continuation is not None:
            return [self._scored(submit, submit.continuation)]
        prompt = tuple(self._prompt(submit))
        sampling = resolve(submit.sampling, prompt, self.limits, self._default_seed())
        return [self._request(submit, prompt, sampling, choice) for choice in range(sampling.n)]

    def _scored(self, submit: Submit, continuation: str | list[int]) -> Request:
        """A request whose one token nobody wants: its prompt is what counts."""
        if submit.messages is not None:
            raise RequestError("a continuation is scored after a prompt, not after messages")
        if submit.sampling != SamplingParams():
            raise RequestError("a continuation is scored, nothing is generated: leave the sampling parameters out")
        for text in (submit.prompt, continuation):
            self._check_length(len(text) if isinstance(text, str) else 0)
        pair = pair_of(self._tokenizer, submit.prompt, continuation, self.limits.max_model_len - 1)
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=1, prompt_logprobs_from=pair.first - 1)
        sampling = resolve(sampling, pair.token_ids, self.limits, self._default_seed())
        return replace(self._request(submit, pair.token_ids, sampling, 0), num_cut=pair.num_cut)

    def _check(self, submit: Submit) -> None:
        if submit.model not in (None, self.model):
            raise RequestError(f"model {submit.model!r} is not served here, {self.model!r} is", code="model_not_found")
        for i, stop in enumerate(submit.sampling.stop):
            if len(stop) > MAX_STOP_LENGTH:
                raise RequestError(f"stop[{i}] has {len(stop)} characters: at most {MAX_STOP_LENGTH} are allowed")
        if len(submit.session or "") > MAX_SESSION_LENGTH:
            raise RequestError(f"session has over {MAX_SESSION_LENGTH} characters: give a shorter name")
        if submit.expected_tokens is not None and submit.expected_tokens < 1:
            raise RequestError(f"expected_tokens is {submit.expected_tokens}: it must be at least 1")
        if submit.slowdown is not None:
            check_slowdown(submit.slowdown)

    def _prompt(self, submit: Submit) -> list[int]:
        if (submit.prompt is None) == (submit.messages is None):
            raise RequestError("exactly one of prompt and messages must be given")
        if submit.messages is not None:
            if not submit.messages:
                raise RequestError("messages is empty: there must be at least one")
            self._check_length(sum(len(m.content) for m in submit.messages))
            return self._tokenizer.apply_chat([{"role": m.role, "content": m.content} for m in submit.messages])
        if isinstance(submit.prompt, str):
            self._check_length(len(submit.prompt))
            return self._tokenizer.encode(submit.prompt)
        return submit.prompt or []

    def _check_length(self, num_characters: int) -> None:
        """Spare the tokenizer, and the clients who would wait for it, a text that cannot fit."""
        limit = self.limits.max_model_len * self._tokenizer.longest_piece
        if num_characters > limit:
            raise RequestError(
                f"the prompt has {num_characters} characters, which cannot fit the context of "
                f"{self.limits.max_model_len} tokens: shorten it",
                code="context_length_exceeded",
            )

    def _default_seed(self) -> int:
        """Differs from request to request, and is the same again for the same order of requests."""
        self._num_submits += 1
        text = f"{self._seed} {self._num_submits}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") & MAX_SEED

    def _request(self, submit: Submit, prompt: tuple[int, ...], sampling: SamplingParams, choice: int) -> Request:
        if choice > 0 and sampling.prompt_logprobs is not None:
            sampling = replace(sampling, prompt_logprobs=None)  # the same for all choices; the first brings them
        request_id, self._next_id = self._next_id, self._next_id + 1
        return Request(
            request_id,
            prompt,
            sampling,
            choice,
            submit.service_class,
            submit.session,
            submit.expected_tokens,
            submit.slowdown,
        )


def check_slowdown(slowdown: float) -> None:
    """Raise `RequestError` unless it is one."""
    if not slowdown >= 1:
        raise RequestError(f"slowdown is {slowdown}: it must be at least 1, which is none")
