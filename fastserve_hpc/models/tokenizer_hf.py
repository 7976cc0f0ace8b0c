"""A tokenizer from tokenizer.json and its neighbours in a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fastserve_hpc.errors import ModelError
from fastserve_hpc.models.chat_template import ChatTemplate
from fastserve_hpc.models.tokenizer import BpeTokenizer, DecoderStyle

if TYPE_CHECKING:
    import tokenizers

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class _TokenizerFile(msgspec.Struct):
    """The parts of tokenizer.json that say how tokens become text; the library reads the rest."""

    model: dict[str, msgspec.Raw]
    decoder: dict[str, Any] | None = None


def read(directory: Path) -> BpeTokenizer:
    """Raises `ModelError` naming the file and the cure."""
    config = _json_object(directory / "tokenizer_config.json")
    names = {name: text for name in _SPECIAL_NAMES if (text := _token_text(config.get(name))) is not None}
    path = directory / "tokenizer.json"
    if not path.is_file() and config.get("tokenizer_class") == "GPT2Tokenizer":
        style, library = DecoderStyle(byte_level=True), _gpt2(directory, names)
    else:
        style, library = _style(path), _from_file(path)
    library.no_truncation()
    library.no_padding()
    source = _template_source(directory, config)
    eos = library.token_to_id(names["eos_token"]) if "eos_token" in names else None
    return BpeTokenizer(
        library,
        style,
        eos_token_ids=() if eos is None else (eos,),
        template=None if source is None else ChatTemplate(source, names),
        bos_in_front=library.token_to_id(names["bos_token"]) if _adds_bos(config, names) else None,
        prefix_token_id=library.token_to_id(names["bos_token"]) if "bos_token" in names else None,
    )


def _from_file(path: Path) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path} cannot be read ({error}): copy it again, or update the tokenizers package") from error


def _gpt2(directory: Path, names: dict[str, str]) -> tokenizers.Tokenizer:
    """The two files of older models, OPT among them: byte-level BPE with GPT-2's way to cut a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    files = (directory / "vocab.json", directory / "merges.txt")
    try:
        library = Tokenizer(models.BPE.from_file(*map(str, files)))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(
            f"{directory} has no tokenizer.json, and of {files[0].name} and {files[1].name} one is missing or broken "
            f"({error}): copy them again"
        ) from error
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in names.values()])
    return library


def _adds_bos(config: dict[str, Any], names: dict[str, str]) -> bool:
    """tokenizer.json mostly adds it by itself; an explicit wish in the config holds as well."""
    return config.get("add_bos_token") is True and "bos_token" in names


def _style(path: Path) -> DecoderStyle:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ModelError(
            f"{path} is missing: other tokenizer files are not supported; save the model's tokenizer as tokenizer.json"
        ) from None
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from error
    try:
        decoder = msgspec.json.decode(content, type=_TokenizerFile).decoder or {}
    except msgspec.MsgspecError as error:
        raise ModelError(f"{path} is not a tokenizer ({error}): copy it again") from None
    return _style_of(path, decoder)


def _style_of(path: Path, decoder: dict[str, Any]) -> DecoderStyle:
    parts = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    kinds = [str(part.get("type")) for part in parts]
    if kinds == ["ByteLevel"]:
        return DecoderStyle(byte_level=True)
    strips = kinds[-1] == "Strip" and (parts[-1].get("content"), parts[-1].get("start")) == (" ", 1)
    if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        return DecoderStyle(byte_level=False, strip_first_space=strips)
    raise ModelError(
        f"{path}: a decoder of {' + '.join(kinds)} is not supported; "
        "byte-level BPE (ByteLevel) and SentencePiece BPE (Replace + ByteFallback + Fuse [+ Strip]) are"
    )


def _template_source(directory: Path, config: dict[str, Any]) -> str | None:
    """A file of its own wins over the config's entry, which is one template or a list of named ones."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    entry = config.get("chat_template")
    if isinstance(entry, list):
        named = {e.get("name"): e.get("template") for e in entry if isinstance(e, dict)}
        entry = named.get("default")
    return entry if isinstance(entry, str) else None


def _token_text(entry: Any) -> str | None:
    """Special tokens are written as text or as an object with their text in "content"."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None


def _json_object(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ModelError(f"{path} is not a JSON object ({error}): copy it again") from None
