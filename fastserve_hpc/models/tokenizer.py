"""Text and chat messages to token ids and back, as the model's own files say. Never imports transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from fastserve_hpc.errors import ModelError, RequestError
from fastserve_hpc.models.chat_template import ChatTemplate, Messages
from fastserve_hpc.models.text_decoder import (
    ByteDecoder,
    ByteFallbackDecoder,
    Pieces,
    TextDecoder,
    byte_level_table,
)

if TYPE_CHECKING:
    import tokenizers


class Tokenizer(Protocol):
    """What the front door asks of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def longest_piece(self) -> int:
        """Characters of a text that one token stands for at most."""

    @property
    def prefix_token_id(self) -> int | None:
        """What stands for an empty text: the token that begins a text or, without one, the one that ends it."""

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of a prompt; with `add_special`, what the model wants in front of every text too."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""

    def apply_chat(self, messages: Messages) -> list[int]:
        """Token ids that ask for the assistant's next turn. Raises `RequestError`."""

    def text_decoder(self) -> TextDecoder:
        """A fresh decoder for one sequence."""


@dataclass(frozen=True, slots=True)
class DecoderStyle:
    """How pieces become text."""

    byte_level: bool
    strip_first_space: bool = False


class BpeTokenizer:
    """Over the `tokenizers` library: it encodes; decoding is ours, one token at a time."""

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        style: DecoderStyle,
        *,
        eos_token_ids: tuple[int, ...],
        template: ChatTemplate | None = None,
        bos_in_front: int | None = None,
        prefix_token_id: int | None = None,
    ) -> None:
        self._library = library
        self._style = style
        self._template = template
        self._bos_in_front = bos_in_front
        self._pieces = _pieces(library)
        self._bytes_of = byte_level_table(self._pieces)
        self.vocab_size: int = library.get_vocab_size(with_added_tokens=True)
        self.eos_token_ids = eos_token_ids
        self.prefix_token_id = next(iter(eos_token_ids), None) if prefix_token_id is None else prefix_token_id
        # A normalizer may join characters (a Hangul syllable is one of three).
        joined = 1 if library.normalizer is None else 4
        self.longest_piece = joined * max(map(len, library.get_vocab(with_added_tokens=True)), default=1)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        token_ids: list[int] = self._library.encode(text, add_special_tokens=add_special).ids
        bos = self._bos_in_front if add_special else None
        return token_ids if bos is None or token_ids[:1] == [bos] else [bos, *token_ids]

    def decode(self, token_ids: Sequence[int]) -> str:
        decoder = self.text_decoder()
        return "".join([decoder.feed(i) for i in token_ids]) + decoder.finish()

    def apply_chat(self, messages: Messages) -> list[int]:
        if self._template is None:
            raise RequestError("the model has no chat template: send a prompt instead of messages")
        token_ids: list[int] = self._library.encode(self._template.render(messages), add_special_tokens=False).ids
        return token_ids

    def text_decoder(self) -> TextDecoder:
        if self._style.byte_level:
            return ByteDecoder(self._bytes_of)
        return ByteFallbackDecoder(self._pieces, self._style.strip_first_space)


def _pieces(library: tokenizers.Tokenizer) -> Pieces:
    special = {i for i, token in library.get_added_tokens_decoder().items() if token.special}
    id_to_token = library.id_to_token
    return lambda token_id: None if token_id in special else id_to_token(token_id)


class ByteTokenizer:
    """For the fake model: ids 0..255 are bytes; 256 ends a text, it and those after it have none."""

    EOS = 256
    vocab_size = 259
    eos_token_ids = (EOS,)
    prefix_token_id = EOS
    longest_piece = 1

    def encode(self, text: str, add_special: bool = True) -> list[int]:  # noqa: ARG002
        return list(text.encode("utf-8", "replace"))

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(map(self._bytes_of, token_ids)).decode("utf-8", "replace")

    def apply_chat(self, messages: Messages) -> list[int]:
        return self.encode("".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant: ")

    def text_decoder(self) -> TextDecoder:
        return ByteDecoder(self._bytes_of)

    @staticmethod
    def _bytes_of(token_id: int) -> bytes:
        return bytes([token_id]) if 0 <= token_id < 256 else b""


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face directory or a .gguf file. Raises `ModelError` naming kind and cure."""
    # Imported here: both build BpeTokenizers, and the byte tokenizer needs neither.
    from fastserve_hpc.models import tokenizer_gguf, tokenizer_hf

    if path.is_dir():
        return tokenizer_hf.read(path)
    if path.suffix == ".gguf":
        return tokenizer_gguf.read(path)
    raise ModelError(f"{path} is neither a model directory nor a .gguf file")
