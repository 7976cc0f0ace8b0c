"""The header of a GGUF file: metadata and where each tensor lies.

A reader of our own, because a server start has no seconds to spend on it; the tensors' bytes are
read by `gguf_source`. Every length in the file is checked against the file's end before it is used.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from fastserve_hpc.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class TensorType:
    """A storage format: `block_bytes` bytes hold `block_size` neighbouring numbers of one row."""

    name: str
    block_size: int
    block_bytes: int


TENSOR_TYPES: Mapping[int, TensorType] = {
    number: TensorType(*fields)
    for number, fields in {
        0: ("F32", 1, 4),
        1: ("F16", 1, 2),
        2: ("Q4_0", 32, 18),
        3: ("Q4_1", 32, 20),
        6: ("Q5_0", 32, 22),
        7: ("Q5_1", 32, 24),
        8: ("Q8_0", 32, 34),
        10: ("Q2_K", 256, 84),
        11: ("Q3_K", 256, 110),
        12: ("Q4_K", 256, 144),
        13: ("Q5_K", 256, 176),
        14: ("Q6_K", 256, 210),
        30: ("BF16", 1, 2),
    }.items()
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor. `shape` is outermost first, as in torch; `offset` counts from the start of the file."""

    shape: tuple[int, ...]
    type: TensorType
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """All of a GGUF file but the numbers. Metadata arrays are lists."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


def read_header(path: Path) -> GGUFHeader:
    """Read metadata and tensor places of a GGUF file (version 2 or 3, little endian).

    Raises `ModelError` naming the file and the key where the file is not GGUF, torn or inconsistent.
    """
    try:
        with path.open("rb") as file:
            if not (head := file.read(4)):
                raise ModelError(f"{path} is empty: copy the file again")
            if head != MAGIC:
                raise ModelError(f"{path} does not start with 'GGUF': give a .gguf file or a model directory")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, data)
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}") from error


def _parse(path: Path, data: mmap.mmap) -> GGUFHeader:
    cursor = _Cursor(path, data, len(MAGIC))
    version = cursor.number("I")
    if version not in VERSIONS:
        hint = "is it big endian? Convert it again" if version & 0xFFFF == 0 else "convert it with a current llama.cpp"
        raise ModelError(f"{path} is GGUF version {version}, not 2 or 3: {hint}")
    num_tensors, num_keys = cursor.count(), cursor.count()
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.key()
        if key in metadata:
            raise ModelError(f"{path} is broken: key {key!r} appears twice")
        metadata[key] = cursor.value(cursor.number("I"))
    places = [cursor.tensor() for _ in range(num_tensors)]
    return GGUFHeader(path, metadata, _absolute(cursor, places, metadata.get("general.alignment", _DEFAULT_ALIGNMENT)))


def _absolute(cursor: _Cursor, places: list[tuple[str, TensorInfo]], alignment: Any) -> dict[str, TensorInfo]:
    """Offsets from the file's start; they are stored relative to the aligned end of the header."""
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelError(f"{cursor.path} is broken: general.alignment is {alignment!r}")
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, info in places:
        if name in tensors:
            raise ModelError(f"{cursor.path} is broken: tensor {name!r} appears twice")
        end = start + info.offset + info.nbytes
        if end > len(cursor.data):
            raise ModelError(
                f"{cursor.path} is cut short: tensor {name!r} ends at byte {end}, the file at {len(cursor.data)}; "
                "copy the file again"
            )
        tensors[name] = TensorInfo(info.shape, info.type, start + info.offset, info.nbytes)
    return tensors


class _Cursor:
    """Reads one field after the other; `where` is the key or tensor that errors name."""

    def __init__(self, path: Path, data: mmap.mmap, position: int):
        self.path = path
        self.data = data
        self.position = position
        self.where = "the first bytes"

    def take(self, num_bytes: int) -> int:
        """Step over `num_bytes` and return where they start."""
        start = self.position
        if start + num_bytes > len(self.data):
            raise ModelError(f"{self.path} is cut short or broken at {self.where}: copy the file again")
        self.position = start + num_bytes
        return start

    def number(self, code: str) -> Any:
        return _unpacker(code)(self.data, self.take(struct.calcsize(code)))[0]

    def count(self) -> int:
        """A 64-bit length; each counted thing takes at least a byte, so more than the file holds is broken."""
        count = int(self.number("Q"))
        if count > len(self.data):
            raise ModelError(f"{self.path} is cut short or broken at {self.where}: copy the file again")
        return count

    def text(self) -> str:
        start = self.take(self.count())
        return self.data[start : self.position].decode("utf-8", "surrogateescape")

    def key(self) -> str:
        before = self.where
        self.where = f"what follows {before}"
        name = self.text()
        self.where = repr(name)
        return name

    def value(self, kind: int) -> Any:
        if kind == _ARRAY:
            return self.array(self.number("I"), self.count())
        if kind == _STRING:
            return self.text()
        return self.number(self.code(kind))

    def code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise ModelError(f"{self.path} is broken: {self.where} has unknown type {kind}")
        return _SCALARS[kind]

    def array(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return self.strings(count)
        if kind == _ARRAY:
            raise ModelError(f"{self.path}: {self.where} is an array of arrays, which GGUF models do not use")
        code = self.code(kind)
        start = self.take(count * struct.calcsize(code))
        return list(struct.unpack_from(f"<{count}{code}", self.data, start))

    def strings(self, count: int) -> list[str]:
        """`text`, many times: vocabularies have 10^5 entries, so this loop is kept tight."""
        data, position, end = self.data, self.position, len(self.data)
        length_at = _unpacker("Q")
        strings = []
        for _ in range(count):
            start = position + 8
            if start > end or (position := start + length_at(data, start - 8)[0]) > end:
                raise ModelError(f"{self.path} is cut short or broken at {self.where}: copy the file again")
            strings.append(data[start:position].decode("utf-8", "surrogateescape"))
        self.position = position
        return strings

    def tensor(self) -> tuple[str, TensorInfo]:
        """A tensor with its offset still relative to the data's start."""
        name = self.key()
        num_dimensions = self.number("I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise ModelError(f"{self.path} is broken: tensor {name!r} has {num_dimensions} dimensions")
        shape = tuple(int(self.number("Q")) for _ in range(num_dimensions))[::-1]
        kind = self.number("I")
        if kind not in TENSOR_TYPES:
            known = ", ".join(t.name for t in TENSOR_TYPES.values())
            raise ModelError(f"{self.path}: tensor {name!r} has type number {kind}; convert it to one of {known}")
        stored = TENSOR_TYPES[kind]
        row = shape[-1] if shape else 1
        if row % stored.block_size:
            raise ModelError(
                f"{self.path} is broken: tensor {name!r} has rows of {row}, not whole {stored.name} blocks"
            )
        nbytes = prod(shape) // stored.block_size * stored.block_bytes
        return name, TensorInfo(shape, stored, int(self.number("Q")), nbytes)


_STRING, _ARRAY = 8, 9
_SCALARS: Mapping[int, str] = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_UNPACKERS = {code: struct.Struct("<" + code).unpack_from for code in "BbHhIif?Qqd"}


def _unpacker(code: str) -> Callable[..., tuple[Any, ...]]:
    return _UNPACKERS[code]
