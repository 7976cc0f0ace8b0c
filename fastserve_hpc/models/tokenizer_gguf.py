"""A tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastserve_hpc.errors import ModelError
from fastserve_hpc.models.chat_template import ChatTemplate
from fastserve_hpc.models.fields import Fields
from fastserve_hpc.models.gguf import read_header
from fastserve_hpc.models.sentencepiece import SentencePieces, sentencepiece_bpe, usual_spaces
from fastserve_hpc.models.tokenizer import BpeTokenizer, DecoderStyle

if TYPE_CHECKING:
    import tokenizers

_KIND = "tokenizer.ggml.model"
_PRE = "tokenizer.ggml.pre"
_CONTROL, _USER_DEFINED = 3, 4
_CURE = "serve the model's Hugging Face directory (with tokenizer.json) instead"

# How a text is cut before byte-level BPE, per pre-tokenizer name: patterns whose matches stand alone.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def read(path: Path) -> BpeTokenizer:
    """Raises `ModelError` naming the tokenizer's kind and the cure."""
    fields = Fields(str(path), read_header(path).metadata)
    kind = fields.get(_KIND)
    if kind not in ("gpt2", "llama"):
        raise ModelError(
            f"{path}: {_KIND} {kind!r} is not supported, only 'gpt2' (byte-level BPE) and 'llama' (SentencePiece BPE) "
            f"are: {_CURE}"
        )
    tokens, types = _list_of(fields, "tokenizer.ggml.tokens", str), _list_of(fields, "tokenizer.ggml.token_type", int)
    if len(types) != len(tokens):
        raise ModelError(f"{path}: {len(tokens)} tokens, but {len(types)} token types: convert it again")
    has_prefix = kind == "llama" and fields.flag("tokenizer.ggml.add_space_prefix", True)
    if kind == "gpt2":
        library = _byte_level_bpe(fields, tokens)
    else:
        tokens = usual_spaces(tokens)
        library = sentencepiece_bpe(_sentencepiece(fields, tokens), has_prefix)
    _add_tokens(library, tokens, types)
    return BpeTokenizer(
        library,
        DecoderStyle(byte_level=kind == "gpt2", strip_first_space=has_prefix),
        eos_token_ids=(*fields.ids("tokenizer.ggml.eos_token_id"), *fields.ids("tokenizer.ggml.eot_token_id")),
        template=_template(fields, tokens),
        bos_in_front=_bos(fields, "tokenizer.ggml.add_bos_token"),
        prefix_token_id=next(iter(fields.ids("tokenizer.ggml.bos_token_id")), None),
    )


def _sentencepiece(fields: Fields, tokens: list[str]) -> SentencePieces:
    """Scores order the merges, except in Gemma's files, which hold the tokens in that order."""
    unknown = next(iter(fields.ids("tokenizer.ggml.unknown_token_id")), 0)
    if unknown >= len(tokens):
        raise ModelError(f"{fields.place}: tokenizer.ggml.unknown_token_id is {unknown}: convert it again")
    if str(fields.get("general.architecture")).startswith("gemma"):
        return SentencePieces(tokens, [-float(i) for i in range(len(tokens))], tokens[unknown])
    scores = _list_of(fields, "tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise ModelError(f"{fields.place}: {len(tokens)} tokens, but {len(scores)} scores: convert it again")
    return SentencePieces(tokens, scores, tokens[unknown])


def _byte_level_bpe(fields: Fields, tokens: list[str]) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    pre = fields.get(_PRE) or "default"
    pairs = [tuple(merge.split(" ", 1)) for merge in _list_of(fields, "tokenizer.ggml.merges", str)]
    try:
        bpe = models.BPE(
            vocab={token: i for i, token in enumerate(tokens)}, merges=pairs, ignore_merges=pre == "llama-bpe"
        )
    except Exception as error:  # the library raises bare Exception
        raise ModelError(
            f"{fields.place}: its tokens and merges do not fit together ({error}): convert it again"
        ) from error
    library = Tokenizer(bpe)
    library.pre_tokenizer = _pre_tokenizer(fields.place, pre)
    library.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        library.normalizer = normalizers.NFC()
    return library


def _pre_tokenizer(place: str, pre: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    def by_pattern(pattern: str) -> Any:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    makers: dict[str, Callable[[], Any]] = {
        "smollm": lambda: pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
        "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
        "llama-bpe": lambda: by_pattern(_LLAMA3),
        "qwen2": lambda: by_pattern(_QWEN2),
    }
    if pre not in makers:
        raise ModelError(f"{place}: {_PRE} {pre!r} is not supported, only {', '.join(makers)} are: {_CURE}")
    return makers[pre]()


def _add_tokens(library: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control tokens are recognised in text and never shown; user-defined ones are recognised and shown."""
    from tokenizers import AddedToken

    def of_kind(wanted: int) -> list[AddedToken]:
        found = [token for token, kind in zip(tokens, types, strict=True) if kind == wanted]
        return [AddedToken(token, special=wanted == _CONTROL, normalized=False) for token in found]

    library.add_special_tokens(of_kind(_CONTROL))
    library.add_tokens(of_kind(_USER_DEFINED))


def _template(fields: Fields, tokens: list[str]) -> ChatTemplate | None:
    source = fields.get("tokenizer.chat_template")
    if not isinstance(source, str):
        return None
    names = {}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        for token_id in fields.ids(f"tokenizer.ggml.{key}_token_id"):
            if token_id < len(tokens):
                names[name] = tokens[token_id]
    return ChatTemplate(source, names)


def _bos(fields: Fields, key: str) -> int | None:
    """The id that goes in front of every text, if the file says that one does."""
    ids = fields.ids("tokenizer.ggml.bos_token_id")
    default = fields.get(_PRE) == "llama-bpe" or fields.get(_KIND) == "llama"
    return ids[0] if ids and fields.flag(key, default) else None


def _list_of(fields: Fields, key: str, kind: type) -> list[Any]:
    values = fields.get(key)
    if not isinstance(values, list) or not all(isinstance(v, kind) for v in values):
        raise ModelError(f"{fields.place}: {key} is missing or not a list of {kind.__name__}: convert it again")
    return values
