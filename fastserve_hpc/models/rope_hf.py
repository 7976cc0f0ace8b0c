"""Rotary position embeddings as config.json describes them, in its newer and its older ways."""

from __future__ import annotations

from math import log

from fastserve_hpc.errors import ModelError
from fastserve_hpc.models.families import Family
from fastserve_hpc.models.fields import Fields
from fastserve_hpc.models.spec import RopeSpec

_REASONS = {"dynamic": " (its frequencies change with the length of a text, and keys in the cache cannot follow)"}


def read_ropes(config: Fields, family: Family) -> tuple[int, RopeSpec | None, RopeSpec | None]:
    """Positions that the model can tell apart; how its layers rotate; how those with a window do, where that differs.

    Newer files keep all of it in rope_parameters, also by kind of layer; older ones the scaling in rope_scaling, beside
    rope_theta. Raises `ModelError` naming file and key.
    """
    positions = config.count("max_position_embeddings", 2048)
    if family.tensors.positions is not None:
        return positions, None, None
    rope, local = _full(config), _local(config)
    if rope.scaling == "yarn":  # files name either the positions of the training or those after stretching
        positions = max(positions, int(rope.original_max_position * rope.factor))
    return positions, rope, None if local == rope else local


def _full(config: Fields) -> RopeSpec:
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    parameters = _object(config, key)
    if "full_attention" in parameters.values:
        parameters = _object(parameters, "full_attention")
    return _rope(config, parameters, "rope_theta")


def _local(config: Fields) -> RopeSpec | None:
    if config.get("rope_local_base_freq") is None:
        return None
    parameters = _object(config, "rope_parameters")
    return _rope(config, _object(parameters, "sliding_attention"), "rope_local_base_freq")


def _object(fields: Fields, key: str) -> Fields:
    values = fields.get(key)
    if values is not None and not isinstance(values, dict):
        raise fields.error(key, "an object")
    return Fields(f"{fields.place}: {key}", values or {})


def _rope(config: Fields, scaling: Fields, theta_key: str) -> RopeSpec:
    theta = scaling.number("rope_theta", config.number(theta_key, 10000.0))
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if scaling.get("partial_rotary_factor") not in (None, 1):
        raise ModelError(f"{scaling.place}: partial_rotary_factor is set; only whole heads can be rotated")
    if kind == "default":
        return RopeSpec(theta)
    if kind == "linear":
        return RopeSpec(theta, "linear", scaling.number("factor"))
    if kind == "llama3":
        return RopeSpec(
            theta,
            "llama3",
            scaling.number("factor"),
            scaling.number("low_freq_factor"),
            scaling.number("high_freq_factor"),
            _original(config, scaling),
        )
    if kind == "yarn":
        return _yarn(config, scaling, theta)
    raise ModelError(
        f"{scaling.place}: rope type {kind!r} is not supported; default, linear, llama3 and yarn are"
        f"{_REASONS.get(kind, '') if isinstance(kind, str) else ''}"
    )


def _yarn(config: Fields, scaling: Fields, theta: float) -> RopeSpec:
    original = _original(config, scaling)
    factor = scaling.number("factor", config.count("max_position_embeddings", original) / original)
    return RopeSpec(
        theta,
        "yarn",
        factor,
        original_max_position=original,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        attention_factor=scaling.number("attention_factor", _attention_factor(scaling, factor)),
        truncate=scaling.flag("truncate", True),
    )


def _attention_factor(scaling: Fields, factor: float) -> float:
    """Longer texts flatten attention; the rotation makes up for it."""
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        over, under = (yarn_factor(factor, scaling.number(key)) for key in ("mscale", "mscale_all_dim"))
        return over / under
    return yarn_factor(factor)


def yarn_factor(factor: float, weight: float = 1.0) -> float:
    """What yarn multiplies cosine and sine by where the files do not say."""
    return 0.1 * weight * log(factor) + 1.0 if factor > 1 else 1.0


def _original(config: Fields, scaling: Fields) -> int:
    """Positions of the training before the stretching; they may stand beside the scaling or be all there are."""
    beside = config.get("original_max_position_embeddings")
    if beside is not None:
        return config.count("original_max_position_embeddings")
    return scaling.count("original_max_position_embeddings", config.count("max_position_embeddings", 2048))
