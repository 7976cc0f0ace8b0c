"""Weights on their way from files into a rank's tensors: each rank reads only the part it computes with."""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fastserve_hpc.errors import ModelError

ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rope frequencies, [head_dim / 2]; GGUF files carry llama3 scaling in this form."""

_HUGE_PAGE = 2 << 20
_PIECE_ELEMENTS = 2**18
_ROWS_STEP = 32
"""Numbers read at once: enough to be quick, few enough that they are still in a core's cache when they are copied on.
Rows: what kernels like to get together.
"""


class Extent(NamedTuple):
    """Where a tensor's bytes are."""

    path: Path
    start: int
    num_bytes: int
    dtype: torch.dtype | None = None
    """Of its numbers, one after the other; None: they are encoded."""


class WeightSource(Protocol):
    """The tensors of a model's files, under the names that Hugging Face checkpoints use.

    Read by several threads at once.
    """

    @property
    def names(self) -> Collection[str]: ...

    def place(self, name: str) -> str:
        """File and key of a tensor, there or not, for messages."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def extent(self, name: str) -> Extent | None:
        """Where its bytes are; None: not known, and they come as they are touched."""

    def read(self, name: str, rows: range, columns: range) -> Tensor:
        """Part of a tensor [rows, columns] or [rows] on the CPU, of any float type. Not to be written to."""


class RankSource(WeightSource, Protocol):
    """Weights as a rank takes them."""

    def take(self, name: str, rows: range, columns: range, out: Tensor) -> Tensor:
        """Part of a tensor, in the dtype of `out`, which has its shape and is on the CPU: there, or in the file's
        mapping, not to be written to.
        """


@dataclass(frozen=True, slots=True)
class Part:
    """Rows, and for a matrix columns, of the stored tensor `name`, which must have `shape`."""

    name: str
    shape: tuple[int, ...]
    rows: range
    columns: range

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], rows: range | None = None, columns: range | None = None) -> Part:
        """All rows and columns, where not said otherwise."""
        return cls(
            name,
            shape,
            range(shape[0]) if rows is None else rows,
            range(shape[-1]) if columns is None else columns,
        )


class WeightReader:
    """Reads parts of tensors into tensors of the model's dtype on its device. May be shared by threads.

    `norm_offset`: what the source's weights of norms lack.
    """

    def __init__(self, source: RankSource, dtype: torch.dtype, device: torch.device, norm_offset: float = 0.0):
        self.dtype = dtype
        self.device = device
        self.norm_offset = norm_offset
        self._source = source
        self._used: set[str] = set()
        self._buffers = threading.local()

    def read(self, *parts: Part, num_rows: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The parts below each other, in `dtype` or else the model's; `num_rows` adds rows of zeros up to that number.

        Raises `ModelError` naming file and key where one is missing or has another shape.
        """
        for part in parts:
            self._check(part)
        filled = sum(len(part.rows) for part in parts)
        width = [len(parts[0].columns)] if len(parts[0].shape) == 2 else []
        size = [filled if num_rows is None else num_rows, *width]
        out = empty(size, dtype or self.dtype, self.device)
        out[filled:].zero_()
        for row, part, rows in _cut(parts):
            target = out[row : row + len(rows)]
            taken = self._take(part, rows, target if target.is_cpu else self._buffer(part, rows, target.dtype))
            if taken.data_ptr() != target.data_ptr():
                target.copy_(taken)
        return out

    def rows(self, *parts: Part, num_rows: int | None = None) -> StoredRows:
        """What `read` gives, to be read later. Raises what it raises."""
        for part in parts:
            self._check(part)
        return StoredRows(self, parts, num_rows)

    def pieces(self, parts: Sequence[Part]) -> Iterator[tuple[int, Tensor]]:
        """First row and rows on the CPU in the model's dtype, until the same thread asks for the next."""
        for row, part, rows in _cut(parts):
            yield row, self._take(part, rows, self._buffer(part, rows, self.dtype))

    def rope_factors(self, head_dim: int) -> Tensor | None:
        """Divisors of the rotation frequencies, where the files have them; float32 on the CPU."""
        if ROPE_FACTORS not in self._source.names:
            return None
        part = Part.of(ROPE_FACTORS, (head_dim // 2,))
        self._check(part)
        return self.read(part, dtype=torch.float32).cpu()

    def refuse_unread(self, prefixes: Iterable[str]) -> None:
        """Raise `ModelError` if a tensor under one of the prefixes was not read.

        What belongs to a layer and is left over means that the model computes something that we do not.
        """
        started = tuple(prefixes)
        for name in sorted(set(self._source.names) - self._used):
            if name.startswith(started) and not name.endswith("rotary_emb.inv_freq"):
                raise ModelError(f"{self._source.place(name)} has no use in this kind of model: is its config right?")

    def _check(self, part: Part) -> None:
        if part.name not in self._source.names:
            raise ModelError(f"{self._source.place(part.name)} is missing")
        if (found := self._source.shape(part.name)) != part.shape:
            raise ModelError(
                f"{self._source.place(part.name)} has shape {list(found)}, but the configuration makes it "
                f"{list(part.shape)}"
            )
        self._used.add(part.name)

    def _take(self, part: Part, rows: range, out: Tensor) -> Tensor:
        return self._source.take(part.name, rows, part.columns, out)

    def _buffer(self, part: Part, rows: range, dtype: torch.dtype) -> Tensor:
        """This thread's, of the shape of the part's rows."""
        size = [len(rows), *([len(part.columns)] if len(part.shape) == 2 else [])]
        num_bytes = math.prod(size) * dtype.itemsize
        if not hasattr(self._buffers, "own") or len(self._buffers.own) < num_bytes:
            self._buffers.own = torch.empty(num_bytes, dtype=torch.uint8)
        own: Tensor = self._buffers.own
        return own[:num_bytes].view(dtype).view(size)


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Parts of tensors below each other, still in their files: `ops.WeightRows`."""

    reader: WeightReader
    parts: Sequence[Part]
    num_rows: int | None

    @property
    def shape(self) -> tuple[int, int]:
        filled = sum(len(part.rows) for part in self.parts)
        return filled if self.num_rows is None else self.num_rows, len(self.parts[0].columns)

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        return self.reader.pieces(self.parts)

    def whole(self) -> Tensor:
        return self.reader.read(*self.parts, num_rows=self.num_rows)


def _cut(parts: Sequence[Part]) -> Iterator[tuple[int, Part, range]]:
    """The parts, stacked, in pieces: first row in the stack, part, rows of the stored tensor.

    Ranks that want other columns of the same rows begin at different ones, so that each reads other parts of the files.
    """
    before = 0
    for part in parts:
        step = len(part.rows) or 1
        if len(part.shape) == 2:
            step = max(1, _PIECE_ELEMENTS // len(part.columns) // _ROWS_STEP) * _ROWS_STEP
        starts = range(0, len(part.rows), step)
        first = len(starts) * part.columns.start // part.shape[-1]
        for start in (*starts[first:], *starts[:first]):
            yield before + start, part, part.rows[start : start + step]
        before += len(part.rows)


def empty(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU, where it is large, in 2 MB pages: they are there sooner than 512 times as many of 4 KB."""
    num_bytes = math.prod(size) * dtype.itemsize
    if device.type != "cpu" or num_bytes < 2 * _HUGE_PAGE:
        return torch.empty(size, dtype=dtype, device=device)
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=dtype).view(*size)
