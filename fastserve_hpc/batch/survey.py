"""The first reading of the input: how much there is, what it hashes to, which custom_ids come twice."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from fastserve_hpc.batch.lines import Inputs
from fastserve_hpc.batch.linesets import HashSet
from fastserve_hpc.errors import ConfigError

_TELL_EVERY = 2**14


@dataclass(frozen=True, slots=True)
class Shard:
    """Which lines are this run's: those whose index, counted from 0, leaves `number` when divided by `count`."""

    number: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """From "0/4". Raises `ConfigError`."""
        number, slash, count = text.partition("/")
        if not (slash and number.isdecimal() and count.isdecimal() and int(number) < int(count)):
            raise ConfigError(f"--shard {text}: write I/N with I from 0 to N-1, as in 0/4")
        return cls(int(number), int(count))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def __contains__(self, index: int) -> bool:
        return (index - 1) % self.count == self.number


@dataclass(frozen=True, slots=True)
class Survey:
    """What a whole reading has found."""

    num_lines: int
    """Of the shard, without blank lines."""
    last_index: int
    num_bytes: int
    sha256: str
    sha256_at_mark: str | None
    """Of the first `mark` bytes, where a line ends there."""
    repeated: frozenset[int]
    """Hashes of custom_ids that more than one line seems to have; hashes, so to be confirmed."""


class Head(msgspec.Struct, frozen=True):
    """As much of a line as tells whose it is."""

    custom_id: Any = None


_head = msgspec.json.Decoder(Head)


def custom_id_of(raw: bytes, index: int) -> str | None:
    """What the line goes by: the id that it states or, without one, its index; None where that cannot be read."""
    try:
        custom_id = _head.decode(raw).custom_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return default_id(index) if custom_id is None else custom_id if isinstance(custom_id, str) else None


def default_id(index: int) -> str:
    """The custom_id of a line that has none."""
    return f"line-{index}"


class _Digest:
    def __init__(self, mark: int | None) -> None:
        self._sha256 = hashlib.sha256()
        self._mark = mark
        self.num_bytes = 0
        self.at_mark: str | None = None

    def update(self, raw: bytes) -> None:
        self._sha256.update(raw)
        self.num_bytes += len(raw)
        if self.num_bytes == self._mark:
            self.at_mark = self._sha256.hexdigest()

    @property
    def value(self) -> str:
        return self._sha256.hexdigest()


def survey(
    inputs: Inputs, shard: Shard, mark: int | None = None, on_lines: Callable[[int], None] = lambda _: None
) -> Survey:
    """Read all lines once; `on_lines` hears now and then how many.

    Raises `ConfigError` where a file cannot be read, or changes while it is."""
    digest, hashes, repeated = _Digest(mark), HashSet(), set[int]()
    num_lines = last_index = 0
    state = inputs.state()
    for index, _, _, raw in inputs.lines(digest):
        last_index = index
        if not index % _TELL_EVERY:
            on_lines(index)
        if raw.isspace() or not raw:
            continue
        num_lines += index in shard
        custom_id = custom_id_of(raw, index)
        if custom_id is not None and not hashes.add(hash(custom_id)):
            repeated.add(hash(custom_id))
    check_unchanged(inputs, state)
    return Survey(num_lines, last_index, digest.num_bytes, digest.value, digest.at_mark, frozenset(repeated))


def check_unchanged(inputs: Inputs, state: object) -> None:
    """Raise `ConfigError` if a file is not as it was."""
    if inputs.state() != state:
        raise ConfigError("the input changed while it was read: wait until it is whole, then start again")
