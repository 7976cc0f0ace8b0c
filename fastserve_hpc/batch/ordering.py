"""Lines that begin alike run near each other, so that the server computes what they share once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import pairwise

from fastserve_hpc.batch.reader import BatchItem, LineError
from fastserve_hpc.openai.bodies import Ask

WINDOW_LINES = 4096
WINDOW_BYTES = 2**25
"""Of prompts, about."""
_MIN_SHARED = 64
"""Characters that lines must have in common to count as alike."""
_MIN_PART = 8
"""One in so many neighbours must be alike, or the lines stay in their order."""

Item = BatchItem | LineError


def by_prefix(items: Iterable[Item]) -> Iterator[Item]:
    """The same items, each window of them ordered by what they begin with.

    Lines with errors come before their window; lines without a common beginning stay as they are.
    """
    window: list[tuple[str, BatchItem]] = []
    num_bytes = 0
    for item in items:
        if isinstance(item, LineError):
            yield item
            continue
        key = text_of(item.ask)
        window.append((key, item))
        num_bytes += len(key)
        if len(window) == WINDOW_LINES or num_bytes >= WINDOW_BYTES:
            yield from _ordered(window)
            window, num_bytes = [], 0
    yield from _ordered(window)


def text_of(ask: Ask) -> str:
    """What orders the line: its prompt, as one text."""
    prompt = ask.prompt
    if not isinstance(prompt, str):
        prompt = json.dumps(prompt)
    return prompt if ask.continuation is None else f"{prompt}\0{ask.continuation}"


def _ordered(window: list[tuple[str, BatchItem]]) -> Iterator[BatchItem]:
    ordered = sorted(window, key=lambda pair: pair[0])
    alike = sum(a[:_MIN_SHARED] == b[:_MIN_SHARED] and len(a) >= _MIN_SHARED for (a, _), (b, _) in pairwise(ordered))
    for _, item in ordered if alike * _MIN_PART >= len(window) else window:
        yield item
