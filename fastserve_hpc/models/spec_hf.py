"""`ModelSpec` from a Hugging Face directory: config.json and generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path

from fastserve_hpc.errors import ModelError
from fastserve_hpc.models.families import by_config
from fastserve_hpc.models.fields import Fields
from fastserve_hpc.models.spec import ModelSpec, RopeSpec


def read(directory: Path) -> ModelSpec:
    """Raises `ModelError` naming file and key."""
    config = _fields(directory / "config.json")
    architectures = config.get("architectures")
    causal_lm = architectures[0] if isinstance(architectures, list) and architectures else None
    architecture = by_config(config.get("model_type"), causal_lm, config.place)
    _refuse_variants(config)
    num_heads = config.count("num_attention_heads")
    spec = ModelSpec(
        name=directory.resolve().name,
        architecture=architecture,
        num_layers=config.count("num_hidden_layers"),
        hidden_size=config.count("hidden_size"),
        num_heads=num_heads,
        num_kv_heads=config.count("num_key_value_heads", num_heads),
        head_dim=config.count_or_quotient("head_dim", "hidden_size", "num_attention_heads"),
        intermediate_size=config.count("intermediate_size"),
        vocab_size=config.count("vocab_size"),
        max_position=config.count("max_position_embeddings", 2048),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=_rope(config),
        tie_embeddings=config.flag("tie_word_embeddings", False),
        attention_bias=config.flag("attention_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
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


def _refuse_variants(config: Fields) -> None:
    """Settings that would change the numbers and that this decoder does not compute."""
    if config.get("quantization_config") is not None:
        raise ModelError(f"{config.place}: quantization_config is set; give the unquantised model or a .gguf file")
    rope = config.get("rope_parameters") or {}
    for fields in (config.values, rope):
        if fields.get("partial_rotary_factor") not in (None, 1):
            raise ModelError(f"{config.place}: partial_rotary_factor is set; only whole heads can be rotated")
    if (activation := config.get("hidden_act") or "silu") != "silu":
        raise ModelError(f"{config.place}: hidden_act {activation!r} is not supported; only silu is")


def _rope(config: Fields) -> RopeSpec:
    """Newer files keep all of it in rope_parameters, older ones the scaling in rope_scaling beside rope_theta."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    scaling = Fields(f"{config.place}: {key}", config.get(key) or {})
    theta = scaling.number("rope_theta", config.number("rope_theta", 10000.0))
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return RopeSpec(theta)
    if kind == "linear":
        return RopeSpec(theta, "linear", scaling.number("factor"))
    if kind != "llama3":
        raise ModelError(f"{scaling.place}: rope type {kind!r} is not supported; default, linear and llama3 are")
    return RopeSpec(
        theta,
        "llama3",
        scaling.number("factor"),
        scaling.number("low_freq_factor"),
        scaling.number("high_freq_factor"),
        scaling.count("original_max_position_embeddings"),
    )


def _eos(directory: Path, config: Fields) -> tuple[int, ...]:
    """generation_config.json is the later word: chat models add their end-of-turn token there."""
    path = directory / "generation_config.json"
    generation = _fields(path).ids("eos_token_id") if path.is_file() else ()
    return generation or config.ids("eos_token_id")
