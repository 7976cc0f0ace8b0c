"""Names for the content of full KV blocks: who has the same name has the same tokens up to there."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable

_KEY_BYTES = 16


class KeyChain:
    """The keys of a sequence's blocks, each of all tokens up to the block's end.

    Keyed by a secret salt: nobody can make up tokens whose key is another prompt's.
    """

    __slots__ = ("_block_size", "_hash", "keys")

    def __init__(self, block_size: int, salt: bytes):
        self._block_size = block_size
        self._hash = hashlib.blake2b(digest_size=_KEY_BYTES, key=salt)
        self.keys: list[bytes] = []

    def extend(self, tokens: Iterable[int]) -> None:
        """Go on with the tokens behind the last key's; what does not fill a block is left out."""
        size = 4 * self._block_size
        raw = array("i", tokens).tobytes()
        for end in range(size, len(raw) + 1, size):
            self._hash.update(raw[end - size : end])
            self.keys.append(self._hash.copy().digest())
