"""Weights from a parallel file system: each byte read once a node, in sweeps, and the rest is memory.

Whole rows of plain numbers are read to where they are wanted; ranks that want the same find them in the page cache,
which those of a node share. What is encoded, or wanted by columns, is touched in the mapped files. Before a rank does,
the first rank of its node that wants a part reads it with large reads in the order of the file, while the others wait:
page faults would fetch it in small pieces in no order, and each rank its own.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fastserve_hpc.errors import ModelError
from fastserve_hpc.models.weights import Extent, RankSource, WeightSource

READ_BYTES = 8 * 2**20
_MAX_BLOCKS = 2**20
"""Of so many bytes in a tensor."""
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

    `board`: a file that the node's ranks share, for locks and for bytes that say what has been read;
    None where there is one rank. `say` gets a line of progress every few seconds. Used by several threads.
    """

    def __init__(self, board: int | None = None, say: Callable[[str], None] = lambda _: None) -> None:
        self._board = board
        self._say = say
        self._began = self._said = time.monotonic()
        self._turns: dict[int, threading.Lock] = {}
        self._own = threading.local()
        self._counting = threading.Lock()
        self._num_bytes = self._num_done = 0
        self._num_units = 1
        self._got: set[int] = set()

    def of(self, source: WeightSource) -> RankSource:
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
        """Return once the extent with this number, the same on all ranks of the node, is in memory."""
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
        if not hasattr(self._own, "buffer"):
            self._own.buffer = memoryview(bytearray(READ_BYTES))
        with _failures_named(extent.path):
            read_through(extent, self._own.buffer)

    def read_to(self, out: Tensor, path: Path, start: int) -> None:
        """Fill a contiguous tensor on the CPU with the bytes of a file from `start` on."""
        target = memoryview((ctypes.c_char * out.nbytes).from_address(out.data_ptr())).cast("B")
        with _failures_named(path):
            self._file(path).read_to(target, start)
        with self._counting:
            self._num_bytes += len(target)

    def _file(self, path: Path) -> _OpenFile:
        """This thread's: the system reads ahead of each descriptor by itself."""
        file: _OpenFile | None = getattr(self._own, "file", None)
        if file is None or file.path != path:
            file = self._own.file = _OpenFile(path)
        return file


class _OpenFile:
    """Closed when nobody has it any more. Raises `OSError`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)

    def read_to(self, target: memoryview, start: int) -> None:
        """Raises `ModelError` where the file ends before."""
        num_read = 0
        while num_read < len(target):
            count = os.preadv(self._file, [target[num_read:]], start + num_read)
            if count == 0:
                raise _too_short(self.path)
            num_read += count


@contextmanager
def _failures_named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}: is its file system well?") from error


def _too_short(path: Path) -> ModelError:
    return ModelError(f"{path} has become shorter than its header says: copy it again")


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
                raise _too_short(extent.path)
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
            self._fetch(name, extent, rows)
        return self._source.read(name, rows, columns)

    def _fetch(self, name: str, extent: Extent, rows: range) -> None:
        """The rows' bytes, in blocks that are the same for all ranks; of an encoded tensor all."""
        first = self._numbers[name] * _MAX_BLOCKS
        if extent.dtype is None:
            self._reading.fetch(first, extent)
            return
        row_bytes = extent.num_bytes // self._source.shape(name)[0]
        for block in range(rows.start * row_bytes // READ_BYTES, -(-rows.stop * row_bytes // READ_BYTES)):
            start = block * READ_BYTES
            num_bytes = min(READ_BYTES, extent.num_bytes - start)
            self._reading.fetch(first + block, Extent(extent.path, extent.start + start, num_bytes))

    def take(self, name: str, rows: range, columns: range, out: Tensor) -> Tensor:
        """See `RankSource`."""
        extent, shape = self._source.extent(name), self._source.shape(name)
        if extent is None or extent.dtype is None or len(columns) < shape[-1]:
            part = self.read(name, rows, columns)
            return part if part.dtype == out.dtype else out.copy_(part)
        stored = out if out.dtype == extent.dtype else torch.empty(out.shape, dtype=extent.dtype)
        self._reading.read_to(stored, extent.path, extent.start + rows.start * (extent.num_bytes // shape[0]))
        return stored if stored is out else out.copy_(stored)
