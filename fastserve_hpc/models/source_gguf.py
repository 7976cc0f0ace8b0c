"""`WeightSource` of a GGUF file: dequantises the rows that are asked for."""

from __future__ import annotations

import mmap
from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastserve_hpc.models.families import FAMILIES
from fastserve_hpc.models.gguf import GGUFHeader, TensorInfo
from fastserve_hpc.models.spec import ModelSpec
from fastserve_hpc.models.weights import ROPE_FACTORS, Extent

_PLAIN: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES: Mapping[str, str] = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FILE_NAMES = {stored: name for name, stored in _NAMES.items()}


class GGUFSource:
    """The file is mapped, not read: only the pages that hold this rank's rows are."""

    def __init__(self, header: GGUFHeader, spec: ModelSpec):
        self._path = header.path
        self._head_dim = spec.head_dim
        self._permuted = FAMILIES[spec.architecture].gguf_permutes_qk
        self._tensors: dict[str, tuple[str, TensorInfo]] = {
            _checkpoint_name(stored): (stored, info) for stored, info in header.tensors.items()
        }
        with header.path.open("rb") as file:
            # A private mapping: torch wants memory that could be written to.
            self._bytes = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)

    @property
    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def place(self, name: str) -> str:
        return f"{self._path}: tensor {self._tensors[name][0] if name in self._tensors else _file_name(name)}"

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


def _checkpoint_name(stored: str) -> str:
    """The name in Hugging Face checkpoints; the stored name where there is none."""
    if stored == ROPE_FACTORS:
        return stored
    base, _, kind = stored.rpartition(".")
    if base in _FILE_NAMES:
        return f"{_FILE_NAMES[base]}.{kind}"
    if base.startswith("blk.") and base.count(".") == 2:
        _, layer, part = base.split(".")
        return f"model.layers.{layer}.{_LAYER_NAMES.get(part, part)}.{kind}"
    return stored


def _file_name(name: str) -> str:
    """The inverse of `_checkpoint_name`."""
    base, _, kind = name.rpartition(".")
    if base in _NAMES:
        return f"{_NAMES[base]}.{kind}"
    if base.startswith("model.layers."):
        _, _, layer, part = base.split(".", 3)
        stored = next((stored for stored, checkpoint in _LAYER_NAMES.items() if checkpoint == part), part)
        return f"blk.{layer}.{stored}.{kind}"
    return name
