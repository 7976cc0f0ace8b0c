"""Models for sizing, as their configs describe them."""

from __future__ import annotations

from fastserve_hpc.models.spec import ModelSpec, RopeSpec


def llama(name: str, num_layers: int, hidden_size: int, num_heads: int, intermediate_size: int) -> ModelSpec:
    return ModelSpec(
        name=name,
        architecture="llama",
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=intermediate_size,
        vocab_size=128256,
        max_position=8192,
        norm_eps=1e-5,
        rope=RopeSpec(5e5),
        tie_embeddings=False,
    )


LLAMA_8B = llama("llama-8b", num_layers=32, hidden_size=4096, num_heads=32, intermediate_size=14336)
LLAMA_70B = llama("llama-70b", num_layers=80, hidden_size=8192, num_heads=64, intermediate_size=28672)
SMALL = ModelSpec(
    name="small",
    architecture="llama",
    num_layers=30,
    hidden_size=576,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=49152,
    max_position=8192,
    norm_eps=1e-5,
    rope=RopeSpec(1e5),
    tie_embeddings=True,
)
