"""The tokenizer against transformers' on the same files; a token at a time against all at once."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastserve_hpc.errors import ModelError, RequestError
from fastserve_hpc.models import tokenizer_gguf
from fastserve_hpc.models.locate import locate
from fastserve_hpc.models.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

tokenizers = pytest.importorskip("tokenizers")
GGUF = locate("smollm2-135m").path

TEXTS = [
    "Hello, world!",
    " leading and trailing ",
    "tabs\tand\nnew\n\n\nlines\r\n",
    "many    spaces   inside",
    "don't we'll I'M they're",
    "1234567890 3.14159 2024-11-30 x1y22z333",
    "日本語のテキスト。中文字符，한국어",
    "emoji 😀👨‍👩‍👧‍👦🏳️‍🌈 and flags 🇩🇪",
    "Größe ÄÖÜß éèê ñ ø å",
    "Привет мир مرحبا שלום नमस्ते",
    "def f(x):\n    return x ** 2  # comment\n",
    "<|im_start|>user\nhi<|im_end|>",
    "not a <|special|> token, <repo_name> is",
    "\u0000\u0001\u007f\u00a0\u2028\ufeff\ufffd",
    "e\u0301 vs é",
    "a" * 500,
    "(((([[[{{{!!!???...",
    "https://example.org/path?query=1&other=%20#fragment",
    "",
]


@cache
def smollm() -> Tokenizer:
    return load_tokenizer(GGUF)


@cache
def oracle() -> Any:
    """transformers' reading of the same file.

    It leaves out the pre-tokenizer's first half, which the model was trained with: digits stand alone.
    """
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoTokenizer.from_pretrained(str(GGUF.parent), gguf_file=GGUF.name)
    pre = tokenizers.pre_tokenizers
    loaded.backend_tokenizer.pre_tokenizer = pre.Sequence(
        [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)]
    )
    return loaded


@pytest.mark.parametrize("text", TEXTS)
def test_the_same_ids_and_text_as_transformers(text: str) -> None:
    token_ids = smollm().encode(text)
    assert token_ids == oracle()(text)["input_ids"]
    assert smollm().decode(token_ids) == oracle().decode(token_ids, skip_special_tokens=True)


def test_the_same_for_random_texts() -> None:
    rng = random.Random(0)
    alphabet = "ab cd\n\t12 9éß日😀<|>'!\u0301 "
    for _ in range(500):
        text = "".join(rng.choices(alphabet, k=rng.randrange(40)))
        assert smollm().encode(text) == oracle()(text)["input_ids"], repr(text)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "What is the capital of France?"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi  there\n"}],
        [
            {"role": "user", "content": "1 + 1?"},
            {"role": "assistant", "content": "2"},
            {"role": "user", "content": "und 日本 😀?"},
        ],
    ],
)
def test_the_same_chat_prompt_as_transformers(messages: list[dict[str, str]]) -> None:
    expected = oracle().apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
    ids = expected["input_ids"] if hasattr(expected, "keys") else expected
    assert smollm().apply_chat(messages) == ids


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 49200), max_size=40))
def test_a_token_at_a_time_is_the_same_text_as_all_at_once(token_ids: list[int]) -> None:
    """Against the library's own decoder; ids past the vocabulary (padded embeddings) have no text."""
    library = smollm()._library  # type: ignore[attr-defined]
    known = [i for i in token_ids if i < 49152]
    assert smollm().decode(token_ids) == library.decode(known, skip_special_tokens=True)


def test_no_delta_has_half_a_character() -> None:
    text = "日本語 😀👨‍👩‍👧‍👦 Привет"
    decoder = smollm().text_decoder()
    deltas = [decoder.feed(i) for i in smollm().encode(text)]
    assert "".join(deltas) + decoder.finish() == text
    assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["Hello", "Ġ", "1", "2", "3", "4", "ĊĊĠ", "Ġworld", "'s"]),
        ("gpt-2", ["Hello", "Ġ1234", "ĊĊĠ", "Ġworld", "'s"]),
        ("llama-bpe", ["Hello", "Ġ", "123", "4", "ĊĊ", "Ġ", "Ġworld", "'s"]),
        ("qwen2", ["Hello", "Ġ", "1", "2", "3", "4", "ĊĊ", "Ġ", "Ġworld", "'s"]),
    ],
)
def test_how_each_kind_of_vocabulary_cuts_a_text(pre: str, pieces: list[str]) -> None:
    cut = tokenizer_gguf._pre_tokenizer("file", pre).pre_tokenize_str("Hello 1234\n\n  world's")
    assert [piece for piece, _ in cut] == pieces


def test_another_kind_is_named_with_the_cure() -> None:
    with pytest.raises(ModelError, match=r"file: tokenizer.ggml.pre 'tekken' is not supported, only smollm.*directory"):
        tokenizer_gguf._pre_tokenizer("file", "tekken")


def test_numbers_that_a_front_door_needs() -> None:
    assert smollm().vocab_size == 49152
    assert smollm().eos_token_ids == (2,)
    assert smollm().longest_piece == 81
    assert (ByteTokenizer.vocab_size, ByteTokenizer.eos_token_ids) == (259, (256,))


def test_loading_takes_no_half_second_and_no_heavy_library() -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\nt = time.process_time()\n"
        "from fastserve_hpc.models.tokenizer import load_tokenizer\n"
        f"load_tokenizer(Path({str(GGUF)!r}))\nprint(time.process_time() - t)\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'huggingface_hub', 'mpi4py') if m in sys.modules])"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split("\n")
        for _ in range(3)
    ]
    assert all(lines[1] == "[]" for lines in runs), runs
    assert min(float(lines[0]) for lines in runs) < 0.5


def test_encoding_is_fast_enough_for_one_thread() -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 2000
    smollm().encode(text)
    started = time.thread_time()
    smollm().encode(text)
    assert time.thread_time() - started < 0.5


# A Hugging Face directory


def save(directory: Path, **config: Any) -> Path:
    """SmolLM2's tokenizer as a Hugging Face directory."""
    library = smollm()._library  # type: ignore[attr-defined]
    library.save(str(directory / "tokenizer.json"))
    values = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(values))
    return directory


def test_a_directory_gives_the_same_as_the_gguf_file(tmp_path: Path) -> None:
    loaded = load_tokenizer(save(tmp_path))
    for text in TEXTS:
        assert loaded.encode(text) == smollm().encode(text)
        assert loaded.decode(loaded.encode(text)) == smollm().decode(smollm().encode(text))
    assert loaded.eos_token_ids == (2,)
    assert loaded.vocab_size == smollm().vocab_size


def test_bos_goes_in_front_once_if_the_config_wants_it(tmp_path: Path) -> None:
    loaded = load_tokenizer(save(tmp_path, add_bos_token=True))
    assert loaded.encode("hi") == [1, *smollm().encode("hi")]
    assert loaded.encode("<|im_start|>hi") == smollm().encode("<|im_start|>hi")
    plain = load_tokenizer(save(tmp_path, add_bos_token=False))
    assert plain.encode("hi") == smollm().encode("hi")


def test_the_two_files_of_older_models(tmp_path: Path) -> None:
    """As OPT has them."""
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(TEXTS * 3, vocab_size=400, special_tokens=["<s>", "<pad>", "</s>"], show_progress=False)
    trained.save_model(str(tmp_path))
    names = {"bos_token": "</s>", "eos_token": "</s>", "pad_token": {"content": "<pad>"}, "add_bos_token": True}
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({**names, "tokenizer_class": "GPT2Tokenizer"}))
    loaded = load_tokenizer(tmp_path)
    for text in TEXTS:
        assert loaded.encode(text) == [2, *trained.encode(text).ids]
        assert loaded.decode(loaded.encode(text)) == text
    assert loaded.eos_token_ids == (2,)
    assert loaded.encode("a</s>")[-1] == 2
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer\.json, and of vocab\.json and merges\.txt one is missing"):
        load_tokenizer(tmp_path)
    config.write_text(json.dumps({**names, "tokenizer_class": "Qwen2Tokenizer"}))
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path)


def test_where_the_chat_template_comes_from(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(RequestError, match="no chat template: send a prompt"):
        load_tokenizer(save(tmp_path)).apply_chat(messages)
    for entry in (
        "A{{ messages[0].content }}",
        [{"name": "tools", "template": "?"}, {"name": "default", "template": "A{{ messages[0].content }}"}],
    ):
        loaded = load_tokenizer(save(tmp_path, chat_template=entry))
        assert loaded.decode(loaded.apply_chat(messages)) == "Ahi"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}B{{ messages[0].content }}")
    loaded = load_tokenizer(save(tmp_path, chat_template="A"))
    assert loaded.apply_chat(messages) == [1, *loaded.encode("Bhi")]


def sentencepiece_like(directory: Path, decoder: Any) -> Path:
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁": 3, "h": 4, "i": 5, "▁h": 6, "▁hi": 7}
    vocabulary |= {f"<0x{b:02X}>": 8 + b for b in range(256)}
    model = tokenizers.models.BPE(
        vocab=vocabulary, merges=[("▁", "h"), ("▁h", "i")], unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    library = tokenizers.Tokenizer(model)
    normal = tokenizers.normalizers
    library.normalizer = normal.Sequence([normal.Prepend("▁"), normal.Replace(" ", "▁")])
    library.decoder = decoder
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    library.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return directory


def test_sentencepiece_style_with_byte_fallback(tmp_path: Path) -> None:
    d = tokenizers.decoders
    decoder = d.Sequence([d.Replace("▁", " "), d.ByteFallback(), d.Fuse(), d.Strip(" ", 1, 0)])
    loaded = load_tokenizer(sentencepiece_like(tmp_path, decoder))
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("hi", "hi hi", "hi 😀 é", "😀", ""):
        token_ids = loaded.encode(text)
        assert token_ids[0] == 1
        assert loaded.decode(token_ids) == library.decode(token_ids) == text
    rng = random.Random(0)
    for _ in range(300):
        token_ids = [rng.choice([2, 3, 6, 7, 8 + 0xF0, 8 + 0x9F, 8 + 0x98, 8 + 0x80]) for _ in range(9)]
        assert loaded.decode(token_ids) == library.decode(token_ids)


def test_an_unsupported_decoder_is_named_with_the_supported_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json: a decoder of WordPiece is not supported; byte-level BPE"):
        load_tokenizer(sentencepiece_like(tmp_path, tokenizers.decoders.WordPiece()))


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("tokenizer.json", None, "tokenizer.json is missing: other tokenizer files are not supported"),
        ("tokenizer.json", "{", "is not a tokenizer"),
        ("tokenizer.json", '{"model": {}, "decoder": {"type": "ByteLevel"}}', "cannot be read"),
        ("tokenizer_config.json", "[]", "is not a JSON object"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, content: str | None, text: str) -> None:
    save(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=text):
        load_tokenizer(tmp_path)


def test_a_path_that_is_neither(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="neither a model directory nor a .gguf file"):
        load_tokenizer(tmp_path / "model.bin")
