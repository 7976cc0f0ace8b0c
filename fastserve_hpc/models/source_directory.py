"""The weights of a Hugging Face directory, whatever files they are in and however their names begin."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from torch import Tensor

from fastserve_hpc.models import source_bin, source_safetensors
from fastserve_hpc.models.families import TensorNames
from fastserve_hpc.models.weights import Extent, WeightSource

_USUAL = "model."
_OTHERS = ("", "language_model.model.", "model.language_model.")
"""What stands there when the decoder was saved without its head, or as a part of a model with eyes."""


def open_directory(directory: Path, names: TensorNames) -> WeightSource:
    """Its safetensors files, or else its .bin files. Raises `ModelError` where there are neither."""
    source: WeightSource
    safetensors = (source_safetensors.SINGLE, source_safetensors.INDEX)
    bins = (source_bin.SINGLE, source_bin.INDEX)
    if not _has(directory, safetensors) and _has(directory, bins):
        source = source_bin.BinSource(directory)
    else:
        source = source_safetensors.SafetensorsSource(directory)
    return _with_usual_names(source, f"{names.embedding}.weight")


def _has(directory: Path, files: tuple[str, ...]) -> bool:
    return any((directory / file).is_file() for file in files)


def _with_usual_names(source: WeightSource, embedding: str) -> WeightSource:
    if embedding in source.names:
        return source
    for other in _OTHERS:
        if embedding.replace(_USUAL, other, 1) in source.names:
            return RenamedSource(source, other)
    return source


class RenamedSource:
    """Names that begin with `other` in the files begin with "model." here."""

    def __init__(self, source: WeightSource, other: str):
        self._source = source
        self._stored = {name: name for name in source.names}
        self._stored |= {_USUAL + name[len(other) :]: name for name in source.names if name.startswith(other)}

    @property
    def names(self) -> Collection[str]:
        return self._stored.keys()

    def place(self, name: str) -> str:
        return self._source.place(self._stored.get(name, name))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._stored[name])

    def extent(self, name: str) -> Extent | None:
        return self._source.extent(self._stored[name])

    def read(self, name: str, rows: range, columns: range) -> Tensor:
        return self._source.read(self._stored[name], rows, columns)
