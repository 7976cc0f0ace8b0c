"""Tiny random models of every family, written by transformers: two and more layers, odd sizes, windows and rotations
that sequences of the tests go past.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

VOCAB = 131
_SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "intermediate_size": 97,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
_SLIDING = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
_GEMMA: dict[str, Any] = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "sliding_window": 20,
    "query_pre_attn_scalar": 24,
    "attn_implementation": "eager",
}


@dataclass(frozen=True)
class Tiny:
    """One configuration: transformers' class of the family, and what differs from the common sizes."""

    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    shared: bool = True
    """Several ranks share it in the tests; not where its family has another that differs more from the others."""

    def write(self, directory: Path, **changes: Any) -> Any:
        """Save it as transformers does, and return transformers' model of it in float32."""
        import transformers

        settings = {**_SIZES, **self.settings, **changes}
        attention = settings.pop("attn_implementation", "sdpa")
        kind = getattr(transformers, f"{self.kind}ForCausalLM")
        torch.manual_seed(0)
        model = kind._from_config(kind.config_class(**settings), attn_implementation=attention)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms and biases start as ones and zeros, which would hide mistakes
                parameter.data += 0.3 * torch.randn(parameter.shape)
            else:  # large enough for logits of order 1, and for attention that is not the same everywhere
                parameter.data = torch.randn(parameter.shape) * (0.3 if "embed" in name else 0.2)
        model.save_pretrained(directory)
        return model.eval()


def _opt(shared: bool = True, **settings: Any) -> Tiny:
    return Tiny("OPT", {"ffn_dim": 97, "dropout": 0.0, "num_key_value_heads": None, **settings}, shared=shared)


TINY: dict[str, Tiny] = {
    "llama": Tiny("Llama", shared=False),
    "llama, llama3 rope": Tiny("Llama", {"rope_parameters": _LLAMA3, "attention_bias": True, "mlp_bias": True}),
    "llama, linear rope": Tiny(
        "Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}, shared=False
    ),
    "llama, yarn": Tiny("Llama", {"rope_parameters": _YARN, "num_attention_heads": 3, "num_key_value_heads": 1}, False),
    "mistral": Tiny("Mistral", {"sliding_window": 24, "head_dim": 10}),
    "mistral without a window": Tiny("Mistral", {"sliding_window": None, "num_key_value_heads": 4}, shared=False),
    "qwen2": Tiny("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, window in the upper layers": Tiny("Qwen2", _SLIDING, shared=False),
    "qwen3": Tiny("Qwen3", {"head_dim": 14}, shared=False),
    "qwen3, yarn and windows": Tiny("Qwen3", {**_SLIDING, "rope_parameters": _YARN, "head_dim": 20}),
    "gemma2": Tiny(
        "Gemma2", {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "num_hidden_layers": 3}
    ),
    "gemma3": Tiny("Gemma3", {**_GEMMA, "sliding_window_pattern": 3, "num_key_value_heads": 1}),
    "gemma3, capped and stretched": Tiny(
        "Gemma3",
        {
            **_GEMMA,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "final_logit_softcapping": 5.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
    "opt": _opt(),
    "opt with norms behind, embeddings of another size": _opt(do_layer_norm_before=False, word_embed_proj_dim=30),
    "opt without biases and last norm": _opt(
        False, enable_bias=False, _remove_final_layer_norm=True, num_hidden_layers=2
    ),
}
