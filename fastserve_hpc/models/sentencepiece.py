"""SentencePiece vocabularies of the BPE kind, which hold pieces and scores but no merges, for `tokenizers`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers

_SPACE = "\u2581"


@dataclass(frozen=True, slots=True)
class SentencePieces:
    """The pieces by id; of two that could be formed next, the one with the higher score is."""

    pieces: Sequence[str]
    scores: Sequence[float]
    unknown: str


def usual_spaces(pieces: Sequence[str]) -> list[str]:
    """Some files write pieces of nothing but spaces with spaces."""
    return [_SPACE * len(piece) if piece and not piece.strip(" ") else piece for piece in pieces]


def sentencepiece_bpe(vocabulary: SentencePieces, has_prefix: bool) -> tokenizers.Tokenizer:
    """`has_prefix`: a text is encoded as if a space stood before it. What has no piece falls back to its bytes'."""
    from tokenizers import Tokenizer, models, normalizers

    ids = {piece: token_id for token_id, piece in enumerate(vocabulary.pieces)}
    order = sorted(ids, key=lambda piece: -vocabulary.scores[ids[piece]])
    bpe = models.BPE(
        vocab=ids, merges=list(_merges(order, ids)), unk_token=vocabulary.unknown, fuse_unk=True, byte_fallback=True
    )
    library = Tokenizer(bpe)
    spaces = normalizers.Replace(" ", _SPACE)
    library.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if has_prefix else spaces
    return library


def _merges(order: Sequence[str], ids: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Every way to form each piece of two others, the pieces to be formed first at the front."""
    for piece in order:
        for cut in range(len(piece) - 1, 0, -1):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                yield left, right
