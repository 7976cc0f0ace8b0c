"""`WeightSource` of a directory with model.safetensors, whole or in shards."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fastserve_hpc.errors import ModelError
from fastserve_hpc.models.shards import Shards, read_shards
from fastserve_hpc.models.weights import Extent

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class SafetensorsSource:
    """Which file has which tensor comes from the index; files that it does not name are of no account.

    A shard is opened (mapped, not read) when its first tensor is asked for.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._files: dict[str, Any] = {}
        self._extents: dict[str, Mapping[str, Extent]] = {}
        if (directory / INDEX).is_file():
            self._shards = read_shards(directory, INDEX)
        elif (directory / SINGLE).is_file():
            self._shards = Shards(directory, SINGLE, dict.fromkeys(self._file(SINGLE).keys(), SINGLE))
        else:
            raise ModelError(f"{directory} has neither {SINGLE} nor {INDEX}: {_other_weights(directory)}")

    @property
    def names(self) -> Collection[str]:
        return self._shards.names

    def place(self, name: str) -> str:
        return self._shards.place(name)

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self._slice(name)
        if (dtype := stored.get_dtype()) not in _DTYPES:
            raise ModelError(f"{self.place(name)} is stored as {dtype}; only {', '.join(_DTYPES)} are supported")
        return tuple(stored.get_shape())

    def extent(self, name: str) -> Extent:
        shard = self._shards.file(name)
        if shard not in self._extents:
            self._extents[shard] = _extents(self._directory / shard)
        return self._extents[shard][name]

    def read(self, name: str, rows: range, columns: range) -> Tensor:
        stored = self._slice(name)
        whole = (slice(rows.start, rows.stop), slice(columns.start, columns.stop))
        part: Tensor = stored[whole[: len(stored.get_shape())]]
        return part

    def _slice(self, name: str) -> Any:
        try:
            return self._file(self._shards.file(name)).get_slice(name)
        except SafetensorError as error:
            raise ModelError(f"{self.place(name)} is not in that file ({error}): copy the model again") from error

    def _file(self, shard: str) -> Any:
        """Threads that open a shard at the same time both do; the mapping is shared by the system."""
        if shard not in self._files:
            self._files[shard] = _open(self._directory / shard)
        return self._files[shard]


def _open(path: Path) -> Any:
    if not path.is_file():
        raise ModelError(f"{path} is missing, but {INDEX} names it: copy the model again")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is cut short or broken ({error}): copy it again") from error


def _extents(path: Path) -> Mapping[str, Extent]:
    """Of a file that `safe_open` has taken: a length, a JSON header, the bytes that its offsets count."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    return {name: _extent(path, 8 + length, **entry) for name, entry in entries.items()}


def _extent(path: Path, begin: int, data_offsets: tuple[int, int], dtype: str, **_: Any) -> Extent:
    first, end = data_offsets
    return Extent(path, begin + first, end - first, _DTYPES.get(dtype))


def _other_weights(directory: Path) -> str:
    others = sorted(p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".msgpack", ".h5"))
    if others:
        return f"{others[0]} is not read; save the model as safetensors"
    return "copy the model again"
