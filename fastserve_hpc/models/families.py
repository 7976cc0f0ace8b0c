"""The table of model families: how each names itself, its settings and its tensors, and where it differs from the rest.

All are one decoder (`decoder.py`) over shared layers. A new family is a new row, and a field here and
in `ModelSpec` for a difference that no other family has shown yet: docs/models.md says how.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastserve_hpc.errors import ModelError

HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class TensorNames:
    """What Hugging Face checkpoints call the parts, without .weight and .bias; those of a layer below `layers`.N.

    None: the family has no such part.
    """

    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    layers: str = "model.layers"
    attention_norm: str = "input_layernorm"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    out: str = "self_attn.o_proj"
    mlp_norm: str = "post_attention_layernorm"
    gate: str | None = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    q_norm: str | None = None
    k_norm: str | None = None
    attention_out_norm: str | None = None
    """Of what attention adds to the residual stream, before it is added."""
    mlp_out_norm: str | None = None
    positions: str | None = None
    """The table of learned positions, in place of rotation."""
    project_in: str = "model.decoder.project_in"
    """From the embedding's size to that of the layers, where they differ; and back."""
    project_out: str = "model.decoder.project_out"

    def layer(self, index: int) -> str:
        """What the names of a layer's tensors begin with."""
        return f"{self.layers}.{index}."


@dataclass(frozen=True, slots=True)
class SettingNames:
    """What config.json calls the settings that not all families call the same. None: they have no such setting."""

    intermediate_size: str = "intermediate_size"
    activation: str = "hidden_act"
    norm_eps: str | None = "rms_norm_eps"
    bias: str | None = "attention_bias"
    """Whether all four linears of attention have a bias; without such a setting, none has."""
    mlp_bias: str | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """What a family's files look like. The key in `FAMILIES` is the `model_type` of config.json."""

    causal_lm: str
    """The class in config.json's `architectures` that generates text."""
    gguf_architecture: str | None = None
    """None: its GGUF files name another family, or there are none."""
    gguf_permutes_qk: bool = False
    """GGUF files hold the query and key rows of each head in the order that rotates neighbours, not halves."""
    tensors: TensorNames = TensorNames()
    settings: SettingNames = SettingNames()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What config.json means where it leaves a key out. A key that is there and null is none."""
    activation: str = "silu"
    """Of the MLP, as config.json names it, where the files do not say."""
    qkv_bias: bool = False
    """The linears of query, key and value always have a bias, the one behind attention has none."""
    layer_norm: bool = False
    """Norms subtract the mean and have a bias."""
    norm_offset: float = 0.0
    """Checkpoints hold norm weights less this."""
    scales_embedding: bool = False
    """Embeddings are multiplied by the square root of the hidden size."""
    has_windows: bool = False
    """`sliding_window` counts: some or all layers see so many tokens only."""
    gguf_window_pattern: int = 1
    """Of so many layers one sees all, the last; GGUF files do not say. 1: none is excepted."""


_QK_NORMS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
_OUT_NORMS = {
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
_GEMMA_SETTINGS = SettingNames(activation="hidden_activation")
_GEMMA_DEFAULTS = {"tie_word_embeddings": True, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096}
_QWEN_DEFAULTS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_OPT_TENSORS = TensorNames(
    embedding="model.decoder.embed_tokens",
    final_norm="model.decoder.final_layer_norm",
    layers="model.decoder.layers",
    attention_norm="self_attn_layer_norm",
    out="self_attn.out_proj",
    mlp_norm="final_layer_norm",
    gate=None,
    up="fc1",
    down="fc2",
    positions="model.decoder.embed_positions",
)

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        gguf_architecture="llama",
        gguf_permutes_qk=True,
        settings=SettingNames(mlp_bias="mlp_bias"),
    ),
    "mistral": Family(
        "MistralForCausalLM",
        settings=SettingNames(bias=None),
        defaults={"sliding_window": 4096, "max_position_embeddings": 131072},
        has_windows=True,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        gguf_architecture="qwen2",
        settings=SettingNames(bias=None),
        defaults={**_QWEN_DEFAULTS, "max_position_embeddings": 32768},
        qkv_bias=True,
        has_windows=True,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        gguf_architecture="qwen3",
        tensors=TensorNames(**_QK_NORMS),
        defaults={**_QWEN_DEFAULTS, "max_position_embeddings": 32768, "head_dim": 128},
        has_windows=True,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        tensors=TensorNames(**_OUT_NORMS),
        settings=_GEMMA_SETTINGS,
        defaults={
            **_GEMMA_DEFAULTS,
            "sliding_window_pattern": 2,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        activation="gelu_pytorch_tanh",
        norm_offset=1.0,
        scales_embedding=True,
        has_windows=True,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        gguf_architecture="gemma3",
        tensors=TensorNames(**_QK_NORMS, **_OUT_NORMS),
        settings=_GEMMA_SETTINGS,
        defaults={
            **_GEMMA_DEFAULTS,
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "sliding_window_pattern": 6,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
        activation="gelu_pytorch_tanh",
        norm_offset=1.0,
        scales_embedding=True,
        has_windows=True,
        gguf_window_pattern=6,
    ),
    "opt": Family(
        "OPTForCausalLM",
        tensors=_OPT_TENSORS,
        settings=SettingNames("ffn_dim", "activation_function", None, "enable_bias", "enable_bias"),
        defaults={"tie_word_embeddings": True, "enable_bias": True, "do_layer_norm_before": True},
        activation="relu",
        layer_norm=True,
    ),
}


def by_config(model_type: object, causal_lm: object, place: str) -> str:
    """The family of a config.json. Raises `ModelError` naming `place` and what there is."""
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ModelError(
            f"{place}: model_type {model_type!r} is not supported; this version knows {', '.join(FAMILIES)}"
        )
    if causal_lm is not None and causal_lm != family.causal_lm:
        raise ModelError(f"{place}: architectures names {causal_lm!r}, but only {family.causal_lm} generates text")
    return str(model_type)


def by_gguf(architecture: object, place: str) -> str:
    """The family of a GGUF file's general.architecture. Raises `ModelError` naming `place` and what there is."""
    known = {family.gguf_architecture: name for name, family in FAMILIES.items() if family.gguf_architecture}
    if not isinstance(architecture, str) or architecture not in known:
        raise ModelError(
            f"{place}: general.architecture {architecture!r} is not supported; this version knows {', '.join(known)}"
        )
    return known[architecture]
