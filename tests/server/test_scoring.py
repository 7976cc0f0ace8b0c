from __future__ import annotations

from functools import cache

import pytest

from fastserve_hpc.errors import RequestError
from fastserve_hpc.models.locate import locate
from fastserve_hpc.models.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from fastserve_hpc.server.scoring import Pair, pair_of

BYTES = ByteTokenizer()


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(locate("smollm2-135m").path)


def harness_pair(encode: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """As lm-evaluation-harness writes it down, for a context that is not empty."""
    num_spaces = len(context) - len(context.rstrip())
    if num_spaces > 0:
        continuation = context[-num_spaces:] + continuation
        context = context[:-num_spaces]
    whole, before = (encode.encode(text, add_special=False) for text in (context + continuation, context))
    return before, whole[len(before) :]


@pytest.mark.parametrize(
    ("context", "continuation"),
    [
        ("Question: what is 7 times 8?\nAnswer:", " 56"),
        ("Question: what is 7 times 8?\nAnswer: ", "56"),
        ("The end of a line.\n\n", "Another begins"),
        ("A word that goes on in the mid", "dle of itself"),
        ("Tabs\t ", " and spaces"),
        ("Ünïcode ☃ ", "☃☃"),
        ("<|im_start|>user\nHi<|im_end|>\n", "Hello"),
    ],
)
def test_the_border_is_where_the_harness_has_it(context: str, continuation: str) -> None:
    before, after = harness_pair(tokenizer(), context, continuation)
    assert pair_of(tokenizer(), context, continuation, 1000) == Pair((*before, *after), len(before))


def test_an_empty_context_is_the_token_that_begins_texts() -> None:
    bos = tokenizer().prefix_token_id
    assert bos == 1
    words = tokenizer().encode("Hello world")
    assert pair_of(tokenizer(), "", "Hello world", 100) == Pair((bos, *words), 1)
    assert pair_of(tokenizer(), "", words, 100) == Pair((bos, *words), 1)
    assert pair_of(tokenizer(), [], words, 100) == Pair((bos, *words), 1)
    assert pair_of(tokenizer(), "", [bos, *words], 100) == Pair((bos, *words), 1)
    spaces = tokenizer().encode("  \nHello world")
    assert pair_of(tokenizer(), "  \n", "Hello world", 100) == Pair((bos, *spaces), 1)
    assert pair_of(BYTES, "", "a", 10) == Pair((BYTES.EOS, ord("a")), 1)


def test_a_context_that_is_too_long_loses_its_beginning() -> None:
    assert pair_of(BYTES, "abcdef", "xy", 5) == Pair(tuple(b"defxy"), 3, num_cut=3)
    assert pair_of(BYTES, [1, 2, 3], [4], 3) == Pair((2, 3, 4), 2, num_cut=1)
    with pytest.raises(RequestError, match="continuation has 5 tokens, but only 4 fit") as refused:
        pair_of(BYTES, "a", "xxxxx", 5)
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("context", "continuation", "message"),
    [
        ("a", "", "nothing to score"),
        ("", "", "nothing to score"),
        ([1], [], "nothing to score"),
        ("a", [1], "both must be of one kind"),
        ([1], "a", "both must be of one kind"),
    ],
)
def test_what_cannot_be_scored(context: str | list[int], continuation: str | list[int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        pair_of(BYTES, context, continuation, 100)
