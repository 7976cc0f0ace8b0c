"""The sizes of models, as far as they take time and memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastserve_hpc.errors import ModelError

WEIGHT_BYTES = 2
"""fp16 and bf16; of the KV cache too."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder's shape."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    mlp_matrices: int
    """3 with a gate, else 2."""

    @property
    def num_parameters(self) -> int:
        """Of the layers and the head: what every token passes through."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        mlp = self.mlp_matrices * self.hidden_size * self.intermediate_size
        return self.num_layers * (attention + mlp) + self.vocab_size * self.hidden_size

    @property
    def weight_bytes(self) -> int:
        return self.num_parameters * WEIGHT_BYTES

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * WEIGHT_BYTES


def _opt(name: str, num_layers: int, hidden_size: int, num_heads: int) -> ModelShape:
    head_dim = hidden_size // num_heads
    return ModelShape(name, num_layers, hidden_size, num_heads, num_heads, head_dim, 4 * hidden_size, 50272, 2)


SHAPES: Mapping[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _opt("opt-13b", 40, 5120, 40),
        _opt("opt-66b", 64, 9216, 72),
        _opt("opt-175b", 96, 12288, 96),
        ModelShape("smollm2-135m", 30, 576, 9, 3, 64, 1536, 49152, 3),
        ModelShape("llama-3-8b", 32, 4096, 32, 8, 128, 14336, 128256, 3),
        ModelShape("llama-3-70b", 80, 8192, 64, 8, 128, 28672, 128256, 3),
    )
}

_HEAD_DIMS = {"gemma2": 256, "gemma3_text": 256, "qwen3": 128}
"""Where a config.json that does not say does not mean hidden size / heads."""
_GEMMA3 = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208}
"""What its config.json may leave out."""
_UNGATED = ("opt", "gpt2", "gpt_neox", "bloom", "falcon", "phi", "starcoder2")


def find_shape(model: str) -> ModelShape:
    """A known name, a Hugging Face directory or its config.json. Raises `ModelError`."""
    if model in SHAPES:
        return SHAPES[model]
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ModelError(f"--model {model}: no such shape; use {', '.join(SHAPES)} or the path of a config.json")
    return _read_config(path)


def _read_config(path: Path) -> ModelShape:
    try:
        config: dict[str, Any] = json.loads(path.read_bytes())
        config = config.get("text_config") or config  # of a model that also sees
        kind = config.get("model_type")
        config = {**_GEMMA3, **config} if kind == "gemma3_text" else config
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        return ModelShape(
            name=path.resolve().parent.name,
            num_layers=int(config["num_hidden_layers"]),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or _HEAD_DIMS.get(str(kind)) or hidden // heads),
            intermediate_size=int(config.get("intermediate_size") or config.get("ffn_dim") or 4 * hidden),
            vocab_size=int(config["vocab_size"]),
            mlp_matrices=2 if kind in _UNGATED else 3,
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: not the config.json of a decoder: {error!r}") from None
