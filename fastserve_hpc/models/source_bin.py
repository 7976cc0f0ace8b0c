"""`WeightSource` of a directory with pytorch_model.bin, whole or in shards.

These files are pickles, which could hold code to be run. They are read as weights only: whatever else is in one, the
file is refused before anything of it runs.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from fastserve_hpc.errors import ModelError
from fastserve_hpc.models.shards import Shards, read_shards

SINGLE = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"


class BinSource:
    """A shard is opened (mapped, where its format allows it) when its first tensor is asked for."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._files: dict[str, Mapping[str, Tensor]] = {}
        self._opening = threading.Lock()
        if (directory / INDEX).is_file():
            self._shards = read_shards(directory, INDEX)
        else:
            self._shards = Shards(directory, SINGLE, dict.fromkeys(self._file(SINGLE), SINGLE))

    @property
    def names(self) -> Collection[str]:
        return self._shards.names

    def place(self, name: str) -> str:
        return self._shards.place(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensor(name).shape)

    def extent(self, name: str) -> None:  # noqa: ARG002
        """torch does not say where in a file a tensor is."""
        return

    def read(self, name: str, rows: range, columns: range) -> Tensor:
        tensor = self._tensor(name)
        if not tensor.dtype.is_floating_point or tensor.element_size() < 2:
            raise ModelError(f"{self.place(name)} is stored as {tensor.dtype}; only float types are supported")
        part = tensor[rows.start : rows.stop]
        return part if part.dim() == 1 else part[:, columns.start : columns.stop]

    def _tensor(self, name: str) -> Tensor:
        tensor = self._file(self._shards.file(name)).get(name)
        if not isinstance(tensor, Tensor):
            raise ModelError(f"{self.place(name)} is not in that file: copy the model again")
        return tensor

    def _file(self, shard: str) -> Mapping[str, Tensor]:
        with self._opening:
            if shard not in self._files:
                self._files[shard] = _open(self._directory / shard)
            return self._files[shard]


def _open(path: Path) -> Mapping[str, Tensor]:
    if not path.is_file():
        raise ModelError(f"{path} is missing, but {INDEX} names it: copy the model again")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_archive(path))
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{path} is broken, or holds more than weights, which is not read ({_reason(error)}): "
            "save the model as safetensors"
        ) from error
    except Exception as error:  # whatever torn bytes lead torch to
        raise ModelError(f"{path} is cut short or broken ({_reason(error)}): copy it again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no named weights: save the model as safetensors")
    return content


def _is_archive(path: Path) -> bool:
    """Files of newer torch versions are zip archives, of which a part can be read."""
    with path.open("rb") as file:
        return file.read(2) == b"PK"


def _reason(error: Exception) -> str:
    """In one line; torch adds paragraphs of advice."""
    return (str(error).splitlines() or [type(error).__name__])[0]
