"""Weights from a parallel file system: each byte read once a node, in one sweep, and the rest is memory.

Ranks map the files; what they touch there comes from the page cache, which the ranks of a node share. Before a rank
touches a tensor, the first rank of its node that wants it reads all of it with large reads in the order of the file,
while the others wait: page faults would fetch it in small pieces in no order, and each rank its own.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from fastserve_hpc.errors import ModelError
from fastserve_hpc.models.weights import Extent, WeightSource

READ_BYTES = 8 * 2**20
_SAY_EVERY_S = 5.0
_FLOCK = struct.Struct("hhqqi4x")


class Progress(NamedTuple):
    """How far a rank is with its part of the model."""

    num_bytes: int
    """Of the files, of all tensors that it has got so far."""
    seconds: float
    share: float
    """Of its layers."""

    def __str__(self) -> str:
        size, speed = self.num_bytes / 1e9, self.num_bytes / 1e9 / max(self.seconds, 1e-9)
        left_s = self.seconds * (1 / self.share - 1)
        return f"{100 * self.share:.0f} % of the layers, {size:.1f} GB at {speed:.2f} GB/s, {left_s:.0f} s left"


class Reading:
    """What one rank has to do with the reading of its node.

    `board`: a file that the node's ranks share, for locks and for a byte a tensor that says that it has been read;
    None where there is one rank. `say` gets a line of progress every few seconds. Used by several threads.
    """

    def __init__(self, board: int | None = None, say: Callable[[str], None] = lambda _: None) -> None:
        self._board = board
        self._say = say
        self._began = self._said = time.monotonic()
        self._turns: dict[int, threading.Lock] = {}
        self._buffers = threading.local()
        self._counting = threading.Lock()
        self._num_bytes = self._num_done = 0
        self._num_units = 1
        self._got: set[int] = set()

    def of(self, source: WeightSource) -> WeightSource:
        """The source, which now reads through this."""
        return _SourceReadOnce(source, self)

    def expect(self, num_units: int) -> None:
        """The rank's part of the model comes in so many pieces."""
        self._num_units = num_units

    def finished_unit(self) -> None:
        """One of them is there."""
        with self._counting:
            self._num_done += 1
            now = time.monotonic()
            if now - self._said < _SAY_EVERY_S:
                return
            self._said = now
        self._say(f"loading: {self.progress}")

    @property
    def progress(self) -> Progress:
        return Progress(self._num_bytes, time.monotonic() - self._began, self._num_done / self._num_units)

    def fetch(self, number: int, extent: Extent) -> None:
        """Return once the tensor with this number, the same on all ranks of the node, is in memory."""
        if number in self._got:
            return
        with self._turns.setdefault(number, threading.Lock()):
            if number in self._got:
                return
            if self._board is None:
                self._read(extent)
            else:
                self._read_unless_others_have(self._board, number, extent)
            with self._counting:
                self._num_bytes += extent.num_bytes
            self._got.add(number)

    def _read_unless_others_have(self, board: int, number: int, extent: Extent) -> None:
        with _locked(board, number):
            if os.pread(board, 1, number) != b"\1":
                self._read(extent)
                os.pwrite(board, b"\1", number)

    def _read(self, extent: Extent) -> None:
        if not hasattr(self._buffers, "own"):
            self._buffers.own = memoryview(bytearray(READ_BYTES))
        try:
            read_through(extent, self._buffers.own)
        except OSError as error:
            raise ModelError(f"{extent.path}: {error.strerror}: is its file system well?") from error


@contextmanager
def _locked(board: int, number: int) -> Iterator[None]:
    """One process at a time. Not `lockf`: it takes two ranks whose threads wait for each other's tensors for a
    deadlock.
    """
    fcntl.fcntl(board, fcntl.F_OFD_SETLKW, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0))
    try:
        yield
    finally:
        fcntl.fcntl(board, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, number, 1, 0))


def read_through(extent: Extent, buffer: memoryview) -> None:
    """Read an extent from its start to its end, for the sake of the page cache. Raises `OSError` or `ModelError`."""
    file = os.open(extent.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        position, end = extent.start, extent.start + extent.num_bytes
        while position < end:
            count = os.preadv(file, [buffer[: end - position]], position)
            if count == 0:
                raise ModelError(f"{extent.path} has become shorter than its header says: copy it again")
            position += count
    finally:
        os.close(file)


class _SourceReadOnce:
    """A source whose tensors are fetched before they are touched."""

    def __init__(self, source: WeightSource, reading: Reading) -> None:
        self._source = source
        self._reading = reading
        self._numbers = {name: number for number, name in enumerate(sorted(source.names))}

    @property
    def names(self) -> Collection[str]:
        return self._source.names

    def place(self, name: str) -> str:
        return self._source.place(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def extent(self, name: str) -> Extent | None:
        return self._source.extent(name)

    def read(self, name: str, rows: range, columns: range) -> Tensor:
        if (extent := self._source.extent(name)) is not None:
            self._reading.fetch(self._numbers[name], extent)
        return self._source.read(name, rows, columns)
