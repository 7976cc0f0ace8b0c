"""From what a client sent to requests that the engine can take, or a refusal that says why."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from fastserve_hpc.core.request import MAX_SEED, ModelLimits, Request, SamplingParams, resolve
from fastserve_hpc.errors import RequestError
from fastserve_hpc.models.tokenizer import Tokenizer
from fastserve_hpc.protocol import Submit

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
        prompt = tuple(self._prompt(submit))
        sampling = resolve(submit.sampling, prompt, self.limits, self._default_seed())
        return [self._request(submit, prompt, sampling, choice) for choice in range(sampling.n)]

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
        )
