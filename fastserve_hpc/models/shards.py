"""Weights in one file of a directory, or in shards that an index names."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

from fastserve_hpc.errors import ModelError


class Shards:
    """Which file of `directory` has which tensor. Files that the index does not name are of no account."""

    def __init__(self, directory: Path, default: str, files: Mapping[str, str]):
        """`default` is the file to name where a tensor is in none; `files`: tensor -> file."""
        self._directory = directory
        self._default = default
        self._files = files

    @property
    def names(self) -> Collection[str]:
        return self._files.keys()

    def file(self, name: str) -> str:
        return self._files[name]

    def place(self, name: str) -> str:
        """For messages."""
        return f"{self._directory / self._files.get(name, self._default)}: tensor {name}"


def read_shards(directory: Path, index: str) -> Shards:
    """As the index says."""
    return Shards(directory, index, read_index(directory / index))


def read_index(path: Path) -> Mapping[str, str]:
    """Tensor -> file in the same directory."""
    try:
        shards = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} has no weight_map ({error!r}): copy it again") from error
    if not isinstance(shards, dict) or not all(isinstance(s, str) and Path(s).name == s for s in shards.values()):
        raise ModelError(f"{path}: weight_map does not name files of this directory")
    return shards
