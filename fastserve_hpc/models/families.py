"""The table of model families: how each names itself and its tensors, and where it differs from the others.

All are one decoder (`decoder.py`) over shared layers. A new family is a new row, and a field here and
in `ModelSpec` for a difference that no other family has shown yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fastserve_hpc.errors import ModelError


@dataclass(frozen=True, slots=True)
class Family:
    """What a family's files look like. The key in `FAMILIES` is the `model_type` of config.json."""

    causal_lm: str
    """The class in config.json's `architectures` that generates text."""
    gguf_architecture: str
    gguf_permutes_qk: bool = False
    """GGUF files hold the query and key rows of each head in the order that rotates neighbours, not halves."""


FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", gguf_architecture="llama", gguf_permutes_qk=True),
}


def by_config(model_type: object, causal_lm: object, place: str) -> str:
    """The family of a config.json. Raises `ModelError` naming `place` and what there is."""
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ModelError(f"{place}: model_type {model_type!r} is not supported; {_known()}")
    if causal_lm is not None and causal_lm != family.causal_lm:
        raise ModelError(f"{place}: architectures names {causal_lm!r}, but only {family.causal_lm} generates text")
    return str(model_type)


def by_gguf(architecture: object, place: str) -> str:
    """The family of a GGUF file's general.architecture. Raises `ModelError` naming `place` and what there is."""
    for name, family in FAMILIES.items():
        if family.gguf_architecture == architecture:
            return name
    raise ModelError(f"{place}: general.architecture {architecture!r} is not supported; {_known()}")


def _known() -> str:
    return f"this version knows {', '.join(FAMILIES)}"
