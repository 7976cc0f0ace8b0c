"""Weights on their way from files into a rank's tensors: each rank reads only the part it computes with."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fastserve_hpc.errors import ModelError

ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rope frequencies, [head_dim / 2]; GGUF files carry llama3 scaling in this form."""

_CHUNK_ELEMENTS = 2**18
"""Numbers read at once: enough to be quick, few enough that a dequantised chunk stays in a core's cache."""


class Extent(NamedTuple):
    """Where a tensor's bytes are."""

    path: Path
    start: int
    num_bytes: int


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

    def __init__(self, source: WeightSource, dtype: torch.dtype, device: torch.device, norm_offset: float = 0.0):
        self.dtype = dtype
        self.device = device
        self.norm_offset = norm_offset
        self._source = source
        self._used: set[str] = set()

    def read(self, *parts: Part, num_rows: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The parts below each other, in `dtype` or else the model's; `num_rows` adds rows of zeros up to that number.

        Raises `ModelError` naming file and key where one is missing or has another shape.
        """
        for part in parts:
            self._check(part)
        filled = sum(len(part.rows) for part in parts)
        width = [len(parts[0].columns)] if len(parts[0].shape) == 2 else []
        size = [filled if num_rows is None else num_rows, *width]
        out = torch.empty(size, dtype=dtype or self.dtype, device=self.device)
        out[filled:].zero_()
        row = 0
        for part in parts:
            self._fill(out[row : row + len(part.rows)], part)
            row += len(part.rows)
        return out

    def rope_factors(self, head_dim: int) -> Tensor | None:
        """Divisors of the rotation frequencies, where the files have them; float32 on the CPU."""
        if ROPE_FACTORS not in self._source.names:
            return None
        part = Part.of(ROPE_FACTORS, (head_dim // 2,))
        self._check(part)
        return self._source.read(part.name, part.rows, part.columns).float()

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

    def _fill(self, out: Tensor, part: Part) -> None:
        step = max(1, _CHUNK_ELEMENTS // len(part.columns)) if len(part.shape) == 2 else len(part.rows)
        for start in range(0, len(part.rows), step):
            rows = part.rows[start : start + step]
            out[start : start + step].copy_(self._source.read(part.name, rows, part.columns))
