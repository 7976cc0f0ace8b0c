"""Text of tokens as they come: the same as decoding all at once, never half a character, never a stop string."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve_hpc.models.locate import locate
from fastserve_hpc.models.text_decoder import ByteDecoder, ByteFallbackDecoder
from fastserve_hpc.models.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from fastserve_hpc.server.detokenizer import Detokenizer, StopString


def texts_of(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    texts = []
    for token_id in token_ids:
        texts.append(detokenizer.feed(token_id))
        if detokenizer.stopped:
            return texts
    return [*texts, detokenizer.finish()]


def cut(text: str, stop: list[str]) -> str:
    """The definition: the prefix before the stop string that is complete first, the longest of those that tie."""
    ends = [(text.find(s) + len(s), -len(s)) for s in stop if s in text]
    if not ends:
        return text
    end, minus_length = min(ends)
    return text[: end + minus_length]


token_lists = st.lists(st.integers(0, 256), max_size=60)
ascii_like = st.lists(st.sampled_from([97, 98, 0xC3, 0xA4, 0xF0, 0x9F, 0x98, 0x80, 256]), max_size=60)
stops = st.lists(st.text("abä\U0001f600\ufffd", min_size=1, max_size=4), max_size=3)


@given(token_lists | ascii_like, stops)
def test_deltas_join_to_the_whole_text_before_the_first_stop_string(token_ids: list[int], stop: list[str]) -> None:
    tokenizer = ByteTokenizer()
    detokenizer = Detokenizer(tokenizer.text_decoder(), stop)
    assert "".join(texts_of(detokenizer, token_ids)) == cut(tokenizer.decode(token_ids), stop)


@given(st.lists(st.sampled_from("ab"), max_size=40), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1))
def test_held_text_is_never_a_start_of_a_stop_string_for_longer_than_needed(
    letters: list[str], stop: list[str]
) -> None:
    detokenizer = Detokenizer(ByteTokenizer().text_decoder(), stop)
    emitted = ""
    for i, letter in enumerate(letters):
        emitted += detokenizer.feed(ord(letter))
        if detokenizer.stopped:
            return
        whole = "".join(letters[: i + 1])
        starts = {s[:k] for s in stop for k in range(1, len(s))}
        longest = max((len(start) for start in starts if whole.endswith(start)), default=0)
        assert emitted == whole[: len(whole) - longest]


@given(st.text("ab", min_size=1, max_size=8), st.text("ab", max_size=50))
def test_stop_string_is_found_where_str_find_finds_it(needle: str, text: str) -> None:
    finder = StopString(needle)
    end = next((i + 1 for i, letter in enumerate(text) if finder.advance(letter)), None)
    found = text.find(needle)
    assert end == (None if found < 0 else found + len(needle))


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    pytest.importorskip("tokenizers")
    return load_tokenizer(locate("smollm2-135m").path)


def test_the_same_for_a_real_vocabulary_and_stop_strings_from_the_text(smollm: Tokenizer) -> None:
    rng = random.Random(3)
    num_stopped = 0
    for _ in range(500):
        token_ids = [rng.randrange(49152) for _ in range(rng.randrange(1, 30))]
        text = smollm.decode(token_ids)
        start = rng.randrange(len(text) + 1)
        stop = [s for s in (text[start : start + rng.randrange(1, 9)], "not in it") if s]
        detokenizer = Detokenizer(smollm.text_decoder(), stop)
        assert "".join(texts_of(detokenizer, token_ids)) == cut(text, stop)
        num_stopped += detokenizer.stopped
    assert num_stopped > 400


def test_a_character_comes_out_whole_with_its_last_byte() -> None:
    detokenizer = Detokenizer(ByteTokenizer().text_decoder())
    assert [detokenizer.feed(b) for b in "a\U0001f600".encode()] == ["a", "", "", "", "\U0001f600"]


def test_a_broken_last_character_is_shown_as_a_whole_decode_would() -> None:
    detokenizer = Detokenizer(ByteTokenizer().text_decoder())
    assert texts_of(detokenizer, list("ä".encode())[:1]) == ["", "\ufffd"]


def test_stop_strings_count_only_after_min_tokens() -> None:
    detokenizer = Detokenizer(ByteTokenizer().text_decoder(), ["b"], min_tokens=2)
    assert "".join(texts_of(detokenizer, list(b"abab"))) == "aba"
    detokenizer = Detokenizer(ByteTokenizer().text_decoder(), ["ab"], min_tokens=1)
    assert "".join(texts_of(detokenizer, list(b"abxabx"))) == "abx"


def test_a_stop_string_of_many_repeats_costs_the_same_per_letter() -> None:
    finder = StopString("a" * 10_000 + "b")
    assert not any(finder.advance("a") for _ in range(200_000))


@pytest.mark.parametrize("strip", [True, False])
def test_byte_fallback_runs_are_text_only_if_valid_as_a_whole(strip: bool) -> None:
    vocabulary = ["\u2581Hello", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "\u2581", "!", None]
    rng = random.Random(1)
    library = pytest.importorskip("tokenizers").decoders
    parts = [library.Replace("\u2581", " "), library.ByteFallback(), library.Fuse()]
    whole = library.Sequence([*parts, library.Strip(content=" ", left=1)] if strip else parts)
    for _ in range(300):
        ids = [rng.randrange(len(vocabulary)) for _ in range(rng.randrange(12))] + [1, 2, 3, 4] * rng.randrange(2)
        decoder = ByteFallbackDecoder(lambda i: vocabulary[i], strip_first_space=strip)
        text = "".join([decoder.feed(i) for i in ids]) + decoder.finish()
        assert text == whole.decode([t for i in ids if (t := vocabulary[i]) is not None])


def test_byte_decoder_agrees_with_a_whole_decode_for_all_broken_utf8() -> None:
    rng = random.Random(2)
    interesting = [0x41, 0x80, 0xBF, 0xC0, 0xC3, 0xE0, 0xE4, 0xED, 0xA0, 0xF0, 0x9F, 0xF4, 0x90, 0xFF]
    for _ in range(2000):
        data = bytes(rng.choices(interesting, k=rng.randrange(8)))
        decoder = ByteDecoder(lambda i: bytes([i]))
        assert "".join(map(decoder.feed, data)) + decoder.finish() == data.decode("utf-8", "replace")
