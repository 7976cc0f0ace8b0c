"""Writes GGUF files of tiny Llamas, as llama.cpp's converter lays them out."""

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
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(path: Path, model: Any, kind: Quant = Quant.F32, extra: Mapping[str, Tensor] | None = None) -> None:
    """Store transformers' Llama with its matrices in `kind`; the model takes the rounded weights on."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_eos_token_id(2)
    writer.add_token_list([f"token {i}" for i in range(config.vocab_size)])
    for name, parameter in model.named_parameters():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        _add(writer, _stored_name(name), parameter, kind if parameter.dim() == 2 else Quant.F32, heads)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _stored_name(name: str) -> str:
    base, _, suffix = name.rpartition(".")
    if base.startswith("model.layers."):
        _, _, layer, part = base.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.{suffix}"
    return f"{NAMES[base]}.{suffix}"


def _add(writer: Any, name: str, parameter: Tensor, kind: Quant, heads: int | None) -> None:
    data = gguf.quants.quantize(parameter.detach().numpy(), kind)
    rounded = torch.from_numpy(np.array(gguf.quants.dequantize(data, kind), np.float32))
    parameter.data.copy_(rounded.view(parameter.shape))
    if heads is not None:
        pairs = data.reshape(heads, 2, len(data) // heads // 2, *data.shape[1:])
        data = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(data.shape)
    writer.add_tensor(name, data, raw_dtype=kind)
