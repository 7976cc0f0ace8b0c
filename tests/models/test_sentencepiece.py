"""SentencePiece vocabularies from GGUF files, against the rule that they are made by."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gguf
import pytest

from fastserve_hpc.errors import ModelError
from fastserve_hpc.models.tokenizer import load_tokenizer

LETTERS = "abcd▁"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6


def vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Control tokens, bytes, letters, and pieces that are made of two others each, the first made most wanted."""
    rng = random.Random(1)
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *LETTERS]
    kinds = [_UNKNOWN, _CONTROL, _CONTROL, *[_BYTE] * 256, *[_NORMAL] * len(LETTERS)]
    formed = list(LETTERS)
    while len(formed) < 40:
        piece = rng.choice(formed) + rng.choice(formed)
        if piece not in formed:
            formed.append(piece)
    pieces += [*formed[len(LETTERS) :], "<tool>"]
    kinds += [_NORMAL] * (len(formed) - len(LETTERS)) + [_USER_DEFINED]
    scores = [0.0 if kind != _NORMAL else -float(i) for i, kind in enumerate(kinds)]
    return pieces, scores, kinds


def write(path: Path, architecture: str = "llama", **settings: Any) -> Path:
    pieces, scores, kinds = vocabulary()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model(settings.get("model", "llama"))
    writer.add_token_list(pieces)
    writer.add_token_scores(settings.get("scores", scores))
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(settings.get("unknown", 0))
    if "prefix" in settings:
        writer.add_add_space_prefix(settings["prefix"])
    if "bos" in settings:
        writer.add_add_bos_token(settings["bos"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def by_the_rule(text: str) -> list[str]:
    """Of all pairs of neighbours that form a piece, the one with the highest score is joined, until there is none."""
    pieces, scores, _ = vocabulary()
    wanted = dict(zip(pieces, scores, strict=True))
    parts = list(text.replace(" ", "▁"))
    while pairs := [(wanted[a + b], -i) for i, (a, b) in enumerate(zip(parts, parts[1:])) if a + b in wanted]:  # noqa: B905, RUF007
        i = -max(pairs)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_are_joined_by_their_scores(tmp_path: Path, prefix: bool) -> None:
    tokenizer = load_tokenizer(write(tmp_path / "x.gguf", prefix=prefix))
    ids = {piece: i for i, piece in enumerate(vocabulary()[0])}
    rng = random.Random(2)
    for length in range(1, 60):
        text = "".join(rng.choice("abcd ") for _ in range(length))
        parts = by_the_rule(("▁" if prefix else "") + text)
        assert tokenizer.encode(text) == [1, *(ids[part] for part in parts)]
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bytes_special_tokens_and_spaces_in_front(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path / "x.gguf", bos=False))
    ids = {piece: i for i, piece in enumerate(vocabulary()[0])}
    assert tokenizer.encode("é")[-2:] == [ids["<0xC3>"], ids["<0xA9>"]]
    assert ids["<tool>"] in tokenizer.encode("a<tool>b")
    assert tokenizer.encode("a</s>")[-1] == 2
    assert tokenizer.decode(tokenizer.encode("a é</s>")) == "a é"
    assert tokenizer.decode(tokenizer.encode(" a")) == " a"


def test_gemmas_files_hold_pieces_in_the_order_of_joining(tmp_path: Path) -> None:
    """Whatever their scores say."""
    backwards = [float(i) for i in range(len(vocabulary()[0]))]
    right = load_tokenizer(write(tmp_path / "llama.gguf", prefix=False))
    gemma = load_tokenizer(write(tmp_path / "gemma.gguf", "gemma3", scores=backwards, prefix=False))
    llama = load_tokenizer(write(tmp_path / "backwards.gguf", scores=backwards, prefix=False))
    rng = random.Random(3)
    text = "".join(rng.choice("abcd ") for _ in range(500))
    assert gemma.encode(text) == right.encode(text) != llama.encode(text)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scores": [1.0, 2.0]}, "tokens, but 2 scores"),
        ({"unknown": 10**6}, "unknown_token_id is 1000000"),
        ({"model": "t5"}, r"tokenizer.ggml.model 't5' is not supported, only 'gpt2' .* and 'llama' .*directory"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_tokenizer(write(tmp_path / "x.gguf", **settings))
