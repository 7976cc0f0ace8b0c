"""One choice's tokens to text as they come, ending before the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from fastserve_hpc.models.text_decoder import TextDecoder


class Detokenizer:
    """The texts of all calls, joined, are the whole decoded text, cut before the stop string that is complete first.

    Text that may be the start of a stop string is held until that is decided. Stop strings count
    only in the text of tokens after the first `min_tokens`.
    """

    def __init__(self, decoder: TextDecoder, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._decoder = decoder
        self._stops = [StopString(s) for s in stop]
        self._tokens_before_stops = min_tokens
        self._held = ""
        self.stopped = False
        """A stop string is complete; there is no more text."""

    def feed(self, token_id: int) -> str:
        """Take one token; the text that is certain now."""
        text = self._decoder.feed(token_id)
        if self._tokens_before_stops > 0:
            self._tokens_before_stops -= 1
            return text
        return self._filter(text)

    def finish(self) -> str:
        """The rest, when no more tokens come."""
        text = self._filter(self._decoder.finish())
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _filter(self, text: str) -> str:
        """What of the held and the new text can go out."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        pending = self._held + text
        for end, letter in enumerate(text, len(self._held) + 1):
            # All advance, so the list, not any(); of those that end here the longest begins first.
            ended = [stop.length for stop in self._stops if stop.advance(letter)]
            if ended:
                self.stopped, self._held = True, ""
                return pending[: end - max(ended)]
        cut = len(pending) - max(stop.matched for stop in self._stops)
        self._held = pending[cut:]
        return pending[:cut]


class StopString:
    """Finds one string in a text that comes letter by letter, in constant time each (Knuth-Morris-Pratt)."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._border = _borders(text)
        self.length = len(text)
        self.matched = 0
        """Length of the longest prefix that the text so far ends with."""

    def advance(self, letter: str) -> bool:
        """Take a letter; whether the string is complete with it. Not to be called after that."""
        matched = self.matched
        while matched and self._text[matched] != letter:
            matched = self._border[matched]
        self.matched = matched + (self._text[matched] == letter)
        return self.matched == self.length


def _borders(text: str) -> list[int]:
    """For each length, that of the longest proper prefix which is also a suffix of the prefix of that length."""
    borders = [0] * (len(text) + 1)
    matched = 0
    for i in range(1, len(text)):
        while matched and text[matched] != text[i]:
            matched = borders[matched]
        matched += text[matched] == text[i]
        borders[i + 1] = matched
    return borders
