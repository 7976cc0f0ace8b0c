"""Writes GGUF files of tiny models, as llama.cpp's converter lays them out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

Quant = gguf.GGMLQuantizationType
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_NAMES = {
    **NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(path: Path, model: Any, kind: Quant = Quant.F32, extra: Mapping[str, Tensor] | None = None) -> None:
    """Store transformers' model with its matrices in `kind`; the model takes the rounded weights on."""
    config = model.config
    family = config.model_type.removesuffix("_text")
    writer = gguf.GGUFWriter(path, family)
    _add_settings(writer, config)
    for name, parameter in model.named_parameters():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        data = _rounded(parameter, kind if parameter.dim() == 2 else Quant.F32)
        if heads is not None and family == "llama":
            data = _side_by_side(data, heads)
        if family == "gemma3" and name.endswith("norm.weight"):
            data = data + 1
        stored = _stored_name(name, GEMMA_NAMES if family == "gemma3" else NAMES)
        writer.add_tensor(stored, data, raw_dtype=kind if parameter.dim() == 2 else Quant.F32)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_settings(writer: Any, config: Any) -> None:
    rope = config.rope_parameters
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if (head_dim := getattr(config, "head_dim", None)) is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(head_dim)
    if config.model_type == "gemma3_text":
        writer.add_sliding_window(config.sliding_window)
    writer.add_eos_token_id(2)
    writer.add_token_list([f"token {i}" for i in range(config.vocab_size)])


def _stored_name(name: str, names: Mapping[str, str]) -> str:
    base, _, suffix = name.rpartition(".")
    if base.startswith("model.layers."):
        _, _, layer, part = base.split(".", 3)
        return f"blk.{layer}.{names[part]}.{suffix}"
    return f"{names[base]}.{suffix}"


def _rounded(parameter: Tensor, kind: Quant) -> Any:
    """A parameter's bytes in `kind`; it takes on what they stand for."""
    data = gguf.quants.quantize(parameter.detach().numpy(), kind)
    rounded = torch.from_numpy(np.array(gguf.quants.dequantize(data, kind), np.float32))
    parameter.data.copy_(rounded.view(parameter.shape))
    return data


def _side_by_side(data: Any, heads: int) -> Any:
    """Rows in the order that rotates neighbours."""
    pairs = data.reshape(heads, 2, len(data) // heads // 2, *data.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(data.shape)
