"""`ModelSpec` from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fastserve_hpc.errors import ModelError
from fastserve_hpc.models.families import FAMILIES, Family, by_gguf
from fastserve_hpc.models.fields import Fields
from fastserve_hpc.models.gguf import GGUFHeader, read_header
from fastserve_hpc.models.rope_hf import yarn_factor
from fastserve_hpc.models.spec import ModelSpec, RopeSpec

OUTPUT = "output.weight"
EMBEDDING = "token_embd.weight"
_GEMMA3_27B_LAYERS = 62
"""The only size of its family that scales attention by hidden_size / heads; the files do not say so."""


def read(path: Path) -> ModelSpec:
    """Raises `ModelError` naming file and key."""
    return from_header(read_header(path))


def from_header(header: GGUFHeader) -> ModelSpec:
    """The spec that a header's metadata describes."""
    place = str(header.path)
    general = header.metadata.get("general.architecture")
    architecture = by_gguf(general, place)
    family = FAMILIES[architecture]
    fields = Fields(place, header.metadata)
    prefix = f"{general}."
    embedding_length, head_count = prefix + "embedding_length", prefix + "attention.head_count"
    num_heads, num_layers = fields.count(head_count), fields.count(prefix + "block_count")
    head_dim = fields.count_or_quotient(prefix + "attention.key_length", embedding_length, head_count)
    _refuse_variants(fields, prefix, head_dim)
    rope = _rope(fields, prefix)
    spec = ModelSpec(
        name=header.path.stem,
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=fields.count(embedding_length),
        num_heads=num_heads,
        num_kv_heads=fields.count(prefix + "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=fields.count(prefix + "feed_forward_length"),
        vocab_size=_vocab_size(header),
        max_position=fields.count(prefix + "context_length"),
        norm_eps=fields.number(prefix + "attention.layer_norm_rms_epsilon"),
        rope=rope,
        local_rope=_local_rope(fields, prefix, family),
        windows=_windows(fields, prefix, family, num_layers),
        tie_embeddings=OUTPUT not in header.tensors,
        attention_scale=_scale(architecture, fields.count(embedding_length), num_heads, num_layers),
        attention_softcap=fields.number(prefix + "attn_logit_softcapping", 0.0),
        logit_softcap=fields.number(prefix + "final_logit_softcapping", 0.0),
        attention_bias="blk.0.attn_q.bias" in header.tensors,
        attention_out_bias="blk.0.attn_output.bias" in header.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in header.tensors,
        activation="gelu_tanh_mul" if family.activation == "gelu_pytorch_tanh" else "silu_mul",
        eos_token_ids=_eos(header.metadata, fields),
    )
    spec.check(place)
    return spec


def _refuse_variants(fields: Fields, prefix: str, head_dim: int) -> None:
    """Settings that would change the numbers and that this decoder does not compute."""
    if fields.get(prefix + "expert_count"):
        raise ModelError(f"{fields.place}: {prefix}expert_count is set; mixture-of-experts models are not supported")
    if (rotated := fields.get(prefix + "rope.dimension_count")) not in (None, head_dim):
        raise ModelError(f"{fields.place}: {prefix}rope.dimension_count {rotated} is not the head size {head_dim}")
    if (width := fields.get(prefix + "attention.value_length")) not in (None, head_dim):
        raise ModelError(f"{fields.place}: {prefix}attention.value_length {width} is not the key's {head_dim}")


def _vocab_size(header: GGUFHeader) -> int:
    """The embedding's rows: the metadata's count is optional, and differs where rows were padded."""
    embedding = header.tensors.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{header.path} lacks the matrix {EMBEDDING}")
    return embedding.shape[0]


def _rope(fields: Fields, prefix: str) -> RopeSpec:
    """llama3 scaling is not in the metadata: its factors come as a tensor, which the loader reads."""
    theta = fields.number(prefix + "rope.freq_base", 10000.0)
    scaling = prefix + "rope.scaling."
    kind = fields.get(scaling + "type") or "none"
    if kind == "none":
        return RopeSpec(theta)
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{fields.place}: {scaling}type {kind!r} is not supported; none, linear and yarn are")
    factor = fields.number(scaling + "factor")
    if kind == "linear":
        return RopeSpec(theta, "linear", factor)
    if strange := sorted(key for key in fields.values if key.startswith(scaling + "yarn")):
        raise ModelError(f"{fields.place}: {strange[0]} is set; yarn is supported as it is by default only")
    original = fields.count(scaling + "original_context_length")
    return RopeSpec(theta, "yarn", factor, original_max_position=original, attention_factor=yarn_factor(factor))


def _local_rope(fields: Fields, prefix: str, family: Family) -> RopeSpec | None:
    """Files seldom say it, and where a family has it, it is the same in all sizes."""
    default = family.defaults.get("rope_local_base_freq")
    return None if default is None else RopeSpec(fields.number(prefix + "rope.freq_base_swa", default))


def _windows(fields: Fields, prefix: str, family: Family, num_layers: int) -> tuple[int, ...]:
    """Each layer's window; empty where none has one."""
    if fields.get(prefix + "attention.sliding_window") is None:
        return ()
    window = fields.count(prefix + "attention.sliding_window")
    pattern = fields.count(prefix + "attention.sliding_window_pattern", family.gguf_window_pattern)
    return tuple(0 if pattern > 1 and (index + 1) % pattern == 0 else window for index in range(num_layers))


def _scale(architecture: str, hidden_size: int, num_heads: int, num_layers: int) -> float | None:
    if architecture == "gemma3_text" and num_layers == _GEMMA3_27B_LAYERS:
        return float((hidden_size / num_heads) ** -0.5)
    return None


def _eos(metadata: Mapping[str, object], fields: Fields) -> tuple[int, ...]:
    """End of text and, where the file tells them apart, end of turn."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return tuple(dict.fromkeys(i for key in keys if key in metadata for i in fields.ids(key)))
