"""From token ids to text, one token at a time, with the same result as decoding all at once.

Text comes out as soon as it cannot change any more: never half a character.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from functools import cache
from typing import Protocol

Pieces = Callable[[int], str | None]
"""A token's text in the vocabulary; None for special tokens and ids outside it, which are not shown."""

REPLACEMENT = "\ufffd"
_SPACE = "\u2581"


class TextDecoder(Protocol):
    """Decodes one sequence."""

    def feed(self, token_id: int) -> str:
        """The text that is certain now and was not before."""

    def finish(self) -> str:
        """What is left, with U+FFFD for a broken last character."""


class ByteDecoder:
    """Tokens are bytes of UTF-8. `bytes_of` gives a token's."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def feed(self, token_id: int) -> str:
        return self._decode(self._bytes_of(token_id))

    def finish(self) -> str:
        return self._decode(b"", True)


class ByteFallbackDecoder:
    """Tokens are text with U+2581 for a space, or single bytes written <0xHH> (SentencePiece style).

    A run of byte tokens is text only if it is valid as a whole, so it is held until the run ends.
    """

    def __init__(self, pieces: Pieces, strip_first_space: bool) -> None:
        self._pieces = pieces
        self._strip_first_space = strip_first_space
        self._run = bytearray()

    def feed(self, token_id: int) -> str:
        piece = self._pieces(token_id)
        if piece is None:
            return ""
        if (byte := _fallback_byte(piece)) is not None:
            self._run.append(byte)
            return ""
        return self._emit(self._end_run() + piece.replace(_SPACE, " "))

    def finish(self) -> str:
        return self._emit(self._end_run())

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _emit(self, text: str) -> str:
        if text and self._strip_first_space:
            self._strip_first_space = False
            return text.removeprefix(" ")
        return text


def byte_level_table(pieces: Pieces) -> Callable[[int], bytes]:
    """`bytes_of` for a byte-level BPE vocabulary; each token is looked up once."""
    known: dict[int, bytes] = {}

    def bytes_of(token_id: int) -> bytes:
        found = known.get(token_id)
        if found is None:
            found = known[token_id] = _byte_level(pieces(token_id) or "")
        return found

    return bytes_of


def _byte_level(piece: str) -> bytes:
    """The bytes that a piece's letters stand for; an added token is plain text and stands for itself."""
    letters = byte_of_letter()
    try:
        return bytes([letters[letter] for letter in piece])
    except KeyError:
        return piece.encode("utf-8", "replace")


@cache
def byte_of_letter() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable Latin-1 stands for itself, other bytes for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


def _fallback_byte(piece: str) -> int | None:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return int(piece[3:5], 16)
        except ValueError:
            return None
    return None
