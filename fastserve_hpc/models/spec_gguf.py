"""`ModelSpec` from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fastserve_hpc.errors import ModelError
from fastserve_hpc.models.families import by_gguf
from fastserve_hpc.models.fields import Fields
from fastserve_hpc.models.gguf import GGUFHeader, read_header
from fastserve_hpc.models.spec import ModelSpec, RopeSpec

OUTPUT = "output.weight"
EMBEDDING = "token_embd.weight"


def read(path: Path) -> ModelSpec:
    """Raises `ModelError` naming file and key."""
    return from_header(read_header(path))


def from_header(header: GGUFHeader) -> ModelSpec:
    """The spec that a header's metadata describes."""
    place = str(header.path)
    general = header.metadata.get("general.architecture")
    architecture = by_gguf(general, place)
    fields = Fields(place, header.metadata)
    prefix = f"{general}."
    embedding_length, head_count = prefix + "embedding_length", prefix + "attention.head_count"
    num_heads = fields.count(head_count)
    head_dim = fields.count_or_quotient(prefix + "attention.key_length", embedding_length, head_count)
    _refuse_variants(fields, prefix, head_dim)
    spec = ModelSpec(
        name=header.path.stem,
        architecture=architecture,
        num_layers=fields.count(prefix + "block_count"),
        hidden_size=fields.count(embedding_length),
        num_heads=num_heads,
        num_kv_heads=fields.count(prefix + "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=fields.count(prefix + "feed_forward_length"),
        vocab_size=_vocab_size(header),
        max_position=fields.count(prefix + "context_length"),
        norm_eps=fields.number(prefix + "attention.layer_norm_rms_epsilon"),
        rope=_rope(fields, prefix),
        tie_embeddings=OUTPUT not in header.tensors,
        attention_bias="blk.0.attn_q.bias" in header.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in header.tensors,
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
    kind = fields.get(prefix + "rope.scaling.type") or "none"
    if kind == "none":
        return RopeSpec(theta)
    if kind != "linear":
        raise ModelError(f"{fields.place}: {prefix}rope.scaling.type {kind!r} is not supported; none and linear are")
    return RopeSpec(theta, "linear", fields.number(prefix + "rope.scaling.factor"))


def _eos(metadata: Mapping[str, object], fields: Fields) -> tuple[int, ...]:
    """End of text and, where the file tells them apart, end of turn."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return tuple(dict.fromkeys(i for key in keys if key in metadata for i in fields.ids(key)))
