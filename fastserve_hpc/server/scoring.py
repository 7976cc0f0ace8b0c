"""What is scored of a context and its continuation: token for token what lm-evaluation-harness scores."""

from __future__ import annotations

from dataclasses import dataclass

from fastserve_hpc.errors import RequestError
from fastserve_hpc.models.tokenizer import Tokenizer

Text = str | list[int]


@dataclass(frozen=True, slots=True)
class Pair:
    """The tokens of both, one after the other."""

    token_ids: tuple[int, ...]
    first: int
    """Where the continuation begins, at least 1."""
    num_cut: int = 0
    """Tokens that were cut off the context's beginning."""


def pair_of(tokenizer: Tokenizer, context: Text | None, continuation: Text, window: int) -> Pair:
    """Both in at most `window` tokens; the beginning of a context that is too long is left out.

    Raises `RequestError` where nothing is left to score, or the continuation alone is too long.
    """
    before, after = _encoded(tokenizer, "" if context is None else context, continuation)
    if not after:
        raise RequestError("the continuation has no token of its own: there is nothing to score")
    if len(after) >= window:
        raise RequestError(
            f"the continuation has {len(after)} tokens, but only {window - 1} fit behind a context: shorten it or "
            "serve with a larger --max-model-len",
            code="context_length_exceeded",
        )
    num_cut = max(0, len(before) + len(after) - window)
    return Pair((*before[num_cut:], *after), len(before) - num_cut, num_cut)


def _encoded(tokenizer: Tokenizer, context: Text, continuation: Text) -> tuple[list[int], list[int]]:
    if isinstance(continuation, str):
        if not isinstance(context, str):
            raise RequestError("the context is token ids, but the continuation is text: both must be of one kind")
        return _encoded_texts(tokenizer, context, continuation)
    if not context:
        return _after_nothing(tokenizer, continuation)
    if isinstance(context, str):
        raise RequestError("the context is text, but the continuation is token ids: both must be of one kind")
    return context, continuation


def _encoded_texts(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """White space at the context's end belongs to the continuation: the tokenizer would not part them there.

    The continuation's tokens are those that the whole text has after as many as the context alone.
    """
    stripped = context.rstrip()
    whole = tokenizer.encode(context + continuation, add_special=False)
    if not stripped:
        return _after_nothing(tokenizer, whole)
    before = tokenizer.encode(stripped, add_special=False)
    return before, whole[len(before) :]


def _after_nothing(tokenizer: Tokenizer, token_ids: list[int]) -> tuple[list[int], list[int]]:
    """What begins a text stands for the context, unless the continuation begins with it by itself."""
    prefix = tokenizer.prefix_token_id
    if prefix is None:
        raise RequestError("the context is empty, and the model has no token that begins or ends a text: give one")
    return ([prefix], token_ids) if token_ids[:1] != [prefix] else (token_ids[:1], token_ids[1:])
