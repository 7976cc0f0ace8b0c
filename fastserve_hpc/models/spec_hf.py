"""`ModelSpec` from a Hugging Face directory: config.json and generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path

from fastserve_hpc.errors import ModelError
from fastserve_hpc.models.families import FAMILIES, Family, by_config
from fastserve_hpc.models.fields import Fields
from fastserve_hpc.models.rope_hf import read_ropes
from fastserve_hpc.models.spec import MLPActivation, ModelSpec

_GATED: dict[str, MLPActivation] = {"silu": "silu_mul", "gelu_pytorch_tanh": "gelu_tanh_mul"}
_PLAIN: dict[str, MLPActivation] = {"relu": "relu"}
_SLIDING, _FULL = "sliding_attention", "full_attention"


def read(directory: Path) -> ModelSpec:
    """Raises `ModelError` naming file and key."""
    config = _fields(directory / "config.json")
    if isinstance(config.get("text_config"), dict):
        config = _text_part(config)
    architectures = config.get("architectures")
    causal_lm = architectures[0] if isinstance(architectures, list) and architectures else None
    architecture = by_config(config.get("model_type"), causal_lm, config.place)
    family = FAMILIES[architecture]
    config = Fields(config.place, {**family.defaults, **config.values})
    _refuse_variants(config)
    names = family.settings
    num_heads, num_layers = config.count("num_attention_heads"), config.count("num_hidden_layers")
    bias = names.bias is not None and config.flag(names.bias, False)
    max_position, rope, local_rope = read_ropes(config, family)
    spec = ModelSpec(
        name=directory.resolve().name,
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=config.count("hidden_size"),
        num_heads=num_heads,
        num_kv_heads=config.count("num_key_value_heads", num_heads),
        head_dim=config.count_or_quotient("head_dim", "hidden_size", "num_attention_heads"),
        intermediate_size=config.count(names.intermediate_size),
        vocab_size=config.count("vocab_size"),
        max_position=max_position,
        norm_eps=1e-5 if names.norm_eps is None else config.number(names.norm_eps, 1e-6),
        rope=rope,
        local_rope=local_rope,
        windows=_windows(config, num_layers) if family.has_windows else (),
        tie_embeddings=config.flag("tie_word_embeddings", False),
        attention_scale=_scale(config),
        attention_softcap=config.number("attn_logit_softcapping", 0.0),
        logit_softcap=config.number("final_logit_softcapping", 0.0),
        attention_bias=bias or family.qkv_bias,
        attention_out_bias=bias,
        mlp_bias=names.mlp_bias is not None and config.flag(names.mlp_bias, False),
        activation=_activation(config, family),
        norm_first=config.flag("do_layer_norm_before", True),
        final_norm=config.flag("do_layer_norm_before", True) and not config.flag("_remove_final_layer_norm", False),
        embedding_size=_embedding_size(config),
        dtype=config.get("dtype") or config.get("torch_dtype"),
        eos_token_ids=_eos(directory, config),
    )
    spec.check(config.place)
    return spec


def _fields(path: Path) -> Fields:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} is not a JSON object")
    return Fields(str(path), values)


def _text_part(config: Fields) -> Fields:
    """The decoder of a model that also sees: it is served for text. What the parts share stands outside."""
    shared = {key: config.get(key) for key in ("dtype", "torch_dtype", "eos_token_id") if config.get(key) is not None}
    return Fields(f"{config.place}: text_config", {**shared, **config.values["text_config"]})


def _refuse_variants(config: Fields) -> None:
    """Settings that would change the numbers and that this decoder does not compute."""
    if config.get("quantization_config") is not None:
        raise ModelError(f"{config.place}: quantization_config is set; give the unquantised model or a .gguf file")
    if config.get("partial_rotary_factor") not in (None, 1):
        raise ModelError(f"{config.place}: partial_rotary_factor is set; only whole heads can be rotated")
    if config.get("use_bidirectional_attention"):
        raise ModelError(f"{config.place}: use_bidirectional_attention is set; only causal models can be served")
    if config.get("layer_norm_elementwise_affine") is False:
        raise ModelError(
            f"{config.place}: layer_norm_elementwise_affine is false; only norms with weights are supported"
        )


def _activation(config: Fields, family: Family) -> MLPActivation:
    known = _PLAIN if family.tensors.gate is None else _GATED
    name = config.get(family.settings.activation) or family.activation
    if name not in known:
        raise ModelError(
            f"{config.place}: {family.settings.activation} {name!r} is not supported; only {' and '.join(known)}"
        )
    return known[name]


def _scale(config: Fields) -> float | None:
    """Some families scale by another number than the size of a head."""
    if config.get("query_pre_attn_scalar") is None:
        return None
    return float(config.number("query_pre_attn_scalar") ** -0.5)


def _embedding_size(config: Fields) -> int | None:
    hidden_size = config.count("hidden_size")
    size = config.count("word_embed_proj_dim", hidden_size)
    return None if size == hidden_size else size


def _windows(config: Fields, num_layers: int) -> tuple[int, ...]:
    """Each layer's window; empty where none has one."""
    if config.get("sliding_window") is None or not config.flag("use_sliding_window", True):
        return ()
    window = config.count("sliding_window")
    if config.get("layer_types") is not None:
        sliding = _named_windows(config, num_layers)
    elif config.get("sliding_window_pattern") is not None:
        pattern = config.count("sliding_window_pattern")
        sliding = [(index + 1) % pattern != 0 for index in range(num_layers)]
    else:
        first = config.get("max_window_layers") or 0
        sliding = [index >= first for index in range(num_layers)]
    return tuple(window if slides else 0 for slides in sliding) if any(sliding) else ()


def _named_windows(config: Fields, num_layers: int) -> list[bool]:
    types = config.get("layer_types")
    if not isinstance(types, list) or len(types) != num_layers or not set(types) <= {_SLIDING, _FULL}:
        raise config.error("layer_types", f"a list of {num_layers} times {_SLIDING} or {_FULL}")
    return [kind == _SLIDING for kind in types]


def _eos(directory: Path, config: Fields) -> tuple[int, ...]:
    """generation_config.json is the later word: chat models add their end-of-turn token there."""
    path = directory / "generation_config.json"
    generation = _fields(path).ids("eos_token_id") if path.is_file() else ()
    return generation or config.ids("eos_token_id")
