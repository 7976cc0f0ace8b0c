"""`WeightSource` of a GGUF file: dequantises the rows that are asked for."""

from __future__ import annotations

import mmap
from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastserve_hpc.models.families import FAMILIES, HEAD, TensorNames
from fastserve_hpc.models.gguf import GGUFHeader, TensorInfo
from fastserve_hpc.models.spec import ModelSpec
from fastserve_hpc.models.weights import Extent

_PLAIN: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_LAYER_NAMES: Mapping[str, str] = {
    "attention_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "out": "attn_output",
    "attention_out_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "mlp_out_norm": "post_ffw_norm",
}
"""Fields of `TensorNames` and what GGUF files call them, the same for all families."""


class _Names:
    """Between the names of a family's checkpoints and those in its GGUF files."""

    def __init__(self, names: TensorNames):
        self._prefix = f"{names.layers}."
        self._ends = {names.embedding: "token_embd", names.final_norm: "output_norm", HEAD: "output"}
        parts = {getattr(names, field): stored for field, stored in _LAYER_NAMES.items()}
        self._parts = {name: stored for name, stored in parts.items() if name is not None}
        self._stored_ends = {stored: name for name, stored in self._ends.items()}
        self._stored_parts = {stored: name for name, stored in self._parts.items()}

    def checkpoint(self, stored: str) -> str:
        """The name in checkpoints; the stored name where there is none."""
        base, _, kind = stored.rpartition(".")
        if base in self._stored_ends:
            return f"{self._stored_ends[base]}.{kind}"
        if base.startswith("blk.") and base.count(".") == 2:
            _, layer, part = base.split(".")
            return f"{self._prefix}{layer}.{self._stored_parts.get(part, part)}.{kind}"
        return stored

    def stored(self, name: str) -> str:
        """The inverse of `checkpoint`."""
        base, _, kind = name.rpartition(".")
        if base in self._ends:
            return f"{self._ends[base]}.{kind}"
        if base.startswith(self._prefix):
            layer, part = base.removeprefix(self._prefix).split(".", 1)
            return f"blk.{layer}.{self._parts.get(part, part)}.{kind}"
        return name


class GGUFSource:
    """The file is mapped, not read: only the pages that hold this rank's rows are."""

    def __init__(self, header: GGUFHeader, spec: ModelSpec):
        self._path = header.path
        self._head_dim = spec.head_dim
        family = FAMILIES[spec.architecture]
        self._permuted = family.gguf_permutes_qk
        self._names = _Names(family.tensors)
        self._tensors: dict[str, tuple[str, TensorInfo]] = {
            self._names.checkpoint(stored): (stored, info) for stored, info in header.tensors.items()
        }
        with header.path.open("rb") as file:
            # A private mapping: torch wants memory that could be written to.
            self._bytes = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)

    @property
    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def place(self, name: str) -> str:
        return f"{self._path}: tensor {self._tensors[name][0] if name in self._tensors else self._names.stored(name)}"

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name][1].shape

    def extent(self, name: str) -> Extent:
        info = self._tensors[name][1]
        return Extent(self._path, info.offset, info.nbytes)

    def read(self, name: str, rows: range, columns: range) -> Tensor:
        info = self._tensors[name][1]
        if len(info.shape) == 1:
            whole = self._decode(info, self._data(info)[None], range(info.shape[0]))[0]
            return whole[self._stored_rows(name, rows)]
        blocks = range(columns.start // info.type.block_size, -(-columns.stop // info.type.block_size))
        first, last = (edge * info.type.block_bytes for edge in (blocks.start, blocks.stop))
        data = self._data(info)[self._stored_rows(name, rows), first:last]
        start = columns.start - blocks.start * info.type.block_size
        return self._decode(info, data, range(start, start + len(columns)))

    def _data(self, info: TensorInfo) -> npt.NDArray[np.uint8]:
        """The stored bytes: [rows, bytes of a row], or [bytes] for one dimension."""
        return self._bytes[info.offset : info.offset + info.nbytes].reshape(*info.shape[:-1], -1)

    def _stored_rows(self, name: str, rows: range) -> slice | npt.NDArray[np.int64]:
        """Where the file has these rows.

        Checkpoints rotate dimension i of a head with i + half; some GGUF files store the pairs side by side.
        """
        if not (self._permuted and name.rpartition(".")[0].endswith(("q_proj", "k_proj"))):
            return slice(rows.start, rows.stop)
        head, dimension = np.divmod(np.arange(rows.start, rows.stop), self._head_dim)
        half, pair = np.divmod(dimension, self._head_dim // 2)
        return np.asarray(head * self._head_dim + 2 * pair + half)

    def _decode(self, info: TensorInfo, data: npt.NDArray[np.uint8], columns: range) -> Tensor:
        """Stored bytes [rows, whole blocks] as numbers [rows, columns]."""
        if (plain := _PLAIN.get(info.type.name)) is not None:
            whole = torch.from_numpy(np.ascontiguousarray(data)).view(plain)
        else:
            whole = torch.from_numpy(_dequantise(info, data)).view(len(data), -1)
        return whole[:, columns.start : columns.stop]


def _dequantise(info: TensorInfo, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    # Imported late: it takes a tenth of a second and only quantised files need it.
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    # As one long row: the package works through 16 rows at a time, which costs more than the numbers do.
    numbers: npt.NDArray[np.float32] = dequantize(data.reshape(1, -1), GGMLQuantizationType[info.type.name])
    return numbers
