"""The packaged model with 16-bit weights for peers: `convert.write_gguf(path, "f16" or "bf16")`.

Its weights are 4-bit; what our server computes with in bf16 is what these files hold.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize

from fastserve_hpc.models.locate import locate

_KINDS = {
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
}


def write_gguf(path: Path, kind: str, model: str = "smollm2-135m") -> Path:
    """Write `path` unless it is there; metadata is that of the model's own file."""
    if path.exists():
        return path
    tensor_type, file_type = _KINDS[kind]
    reader = GGUFReader(locate(model).path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    writer = GGUFWriter(str(unfinished), "llama")
    _copy_metadata(reader, writer, int(file_type))
    for tensor in reader.tensors:
        exact = dequantize(tensor.data, tensor.tensor_type).reshape([int(n) for n in reversed(tensor.shape)])
        rounded = dequantize(quantize(exact, GGMLQuantizationType.BF16), GGMLQuantizationType.BF16)
        if rounded.ndim == 1:
            writer.add_tensor(tensor.name, exact.astype(np.float32))
        else:
            writer.add_tensor(tensor.name, quantize(rounded, tensor_type), raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return unfinished.rename(path)


def _copy_metadata(reader: Any, writer: Any, file_type: int) -> None:
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = file_type if key == "general.file_type" else field.contents()
        kind = field.types[0]
        inner = {"sub_type": field.types[-1]} if kind == GGUFValueType.ARRAY else {}
        writer.add_key_value(key, value, kind, **inner)
