"""Every family by itself: in chunks and among others, with the kernels in bf16, from GGUF, and as its files say it.

That each equals transformers on one rank and on several is in tests/acceptance/test_models.py.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from models.families import TINY, VOCAB
from models.gguf_files import write_gguf
from models.harness import World, oracle_logits
from torch import Tensor

from fastserve_hpc.errors import ModelError
from fastserve_hpc.models.families import FAMILIES
from fastserve_hpc.models.spec import RopeSpec, load_spec
from fastserve_hpc.ops import Ops, find_kernels, for_device

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
LENGTH = 120


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def in_pieces(world: World, ids: list[int]) -> Tensor:
    """Logits of `ids` computed in chunks of several sizes and a decode, with other sequences in between."""
    parts = [
        world.forward([(1, 0, ids[:7])]),
        world.forward([(2, 0, tokens(30)), (1, 7, ids[7:64])])[30:],
        world.forward([(1, 64, ids[64:-1]), (3, 0, tokens(5))])[:-5],
        world.forward([(2, 30, tokens(1)), (1, len(ids) - 1, ids[-1:]), (3, 5, tokens(2))])[1:2],
    ]
    return torch.cat(parts)


@cache
def kernel_ops() -> Ops | None:
    kernels = find_kernels(16, 32, 1)
    return None if isinstance(kernels, str) else for_device(torch.device("cpu"), "bfloat16", kernels).ops


def test_there_is_a_tiny_model_of_every_family() -> None:
    kinds = {f"{tiny.kind}ForCausalLM" for tiny in TINY.values()}
    assert kinds == {family.causal_lm for family in FAMILIES.values()}


@pytest.mark.parametrize("name", TINY)
def test_chunks_among_others_equal_transformers(tmp_path: Path, name: str) -> None:
    oracle = TINY[name].write(tmp_path)
    ids = tokens(LENGTH)
    torch.testing.assert_close(in_pieces(World(tmp_path), ids), oracle_logits(oracle, ids), **TOLERANCE)


@pytest.mark.parametrize("name", TINY)
def test_kernels_are_exact_to_bf16_and_give_the_same_bits_in_any_batch(tmp_path: Path, name: str) -> None:
    """OPT's layers are computed operation by operation, the others' at once."""
    if (ops := kernel_ops()) is None:
        pytest.skip("no C++ kernels: run python kernels/build.py")
    tiny = TINY[name]
    sizes = {"hidden_size": 128} if tiny.kind == "OPT" else {"head_dim": 32}
    oracle = tiny.write(tmp_path, **sizes)
    ids = tokens(LENGTH)
    world = World(tmp_path, dtype=torch.bfloat16, ops=ops)
    found, plain = world.forward([(0, 0, ids)]), World(tmp_path, dtype=torch.bfloat16).forward([(0, 0, ids)])
    expected = oracle_logits(oracle, ids)
    assert error(found, expected) < 1.5 * error(plain, expected) < 0.1
    assert torch.equal(in_pieces(world, ids), found)
    if tiny.shared:
        ranks = World(tmp_path, 2, 2, torch.bfloat16, ops=ops)
        assert error(ranks.forward([(0, 0, ids)]), expected) < 1.5 * error(plain, expected)
        assert torch.equal(in_pieces(ranks, ids), ranks.forward([(0, 0, ids)]))


def error(found: Tensor, expected: Tensor) -> float:
    """Root mean square, relative to that of the logits."""
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_gguf_files_hold_the_same_model(tmp_path: Path, name: str, tp_size: int) -> None:
    changes: dict[str, Any] = {"num_key_value_heads": 2}
    if name == "gemma3":  # what its GGUF files do not say is the same in all published sizes
        changes |= {"sliding_window_pattern": 6, "num_hidden_layers": 7, "query_pre_attn_scalar": 16}
    oracle = TINY[name].write(tmp_path / "hf", **changes)
    ids = tokens(LENGTH)
    expected = oracle_logits(oracle, ids)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, oracle)
    torch.testing.assert_close(World(path, tp_size).forward([(0, 0, ids)]), expected, **TOLERANCE)


def test_layers_may_be_unevenly_split_and_the_head_share_the_embedding(tmp_path: Path) -> None:
    oracle = TINY["gemma3"].write(tmp_path)
    ids = tokens(50)
    torch.testing.assert_close(World(tmp_path, 1, 3).forward([(0, 0, ids)]), oracle_logits(oracle, ids), **TOLERANCE)


def test_the_decoder_of_a_model_with_eyes_is_served_for_text(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    oracle = TINY["gemma3"].write(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    stored = load_file(tmp_path / "model.safetensors")
    ids = tokens(50)
    for prefix in ("language_model.model.", "model.language_model."):
        named = {prefix + name.removeprefix("model."): tensor for name, tensor in stored.items()}
        save_file({**named, "vision_tower.embeddings.weight": torch.ones(3)}, tmp_path / "model.safetensors")
        logits = World(tmp_path).forward([(0, 0, ids)])
        torch.testing.assert_close(logits, oracle_logits(oracle, ids), **TOLERANCE)


COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 99,
    "ffn_dim": 77,
    "vocab_size": 131,
}


def spec_of(directory: Path, model_type: str, **settings: Any) -> Any:
    (directory / "config.json").write_text(json.dumps({**COMMON, "model_type": model_type, **settings}))
    return load_spec(directory)


def test_what_older_config_files_leave_out(tmp_path: Path) -> None:
    """The published files of these models, of which some say little."""
    gemma = spec_of(tmp_path, "gemma3_text", sliding_window=512, head_dim=None, num_hidden_layers=7)
    assert gemma.windows == (512, 512, 512, 512, 512, 0, 512)
    assert (gemma.rope, gemma.local_rope) == (RopeSpec(1e6), RopeSpec(1e4))
    assert (gemma.tie_embeddings, gemma.activation, gemma.scale) == (True, "gelu_tanh_mul", 1 / 16)
    assert spec_of(tmp_path, "gemma3_text").head_dim == 256
    stretched = spec_of(tmp_path, "gemma3_text", rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert (stretched.rope, stretched.local_rope) == (RopeSpec(1e6, "linear", 8.0), RopeSpec(1e4))
    assert spec_of(tmp_path, "mistral", sliding_window=None).windows == ()
    assert spec_of(tmp_path, "mistral").windows == (4096,) * 4
    assert spec_of(tmp_path, "llama", sliding_window=4096).windows == ()
    assert spec_of(tmp_path, "qwen2", sliding_window=32768).windows == ()
    qwen = spec_of(tmp_path, "qwen2", use_sliding_window=True, sliding_window=99, max_window_layers=3)
    assert qwen.windows == (0, 0, 0, 99)
    assert (qwen.attention_bias, qwen.attention_out_bias, qwen.mlp_bias) == (True, False, False)
    assert spec_of(tmp_path, "qwen3").head_dim == 128


def test_opt(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "opt", num_key_value_heads=None, word_embed_proj_dim=32, do_layer_norm_before=False)
    assert (spec.intermediate_size, spec.num_kv_heads, spec.max_position, spec.rope) == (77, 8, 2048, None)
    assert (spec.embedding_size, spec.norm_first, spec.final_norm, spec.is_gated) == (32, False, False, False)
    assert spec.attention_bias
    assert spec.attention_out_bias
    assert spec.mlp_bias
    assert spec.tie_embeddings


def test_yarn(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    spec = spec_of(tmp_path, "qwen2", max_position_embeddings=32768, rope_scaling=yarn)
    assert spec.rope.attention_factor == pytest.approx(1.138629)
    assert spec.max_position == 131072
    assert spec_of(tmp_path, "qwen2", max_position_embeddings=99, rope_scaling=yarn).max_position == 131072
    told = {**yarn, "attention_factor": 2.0, "beta_fast": 20, "beta_slow": 2, "truncate": False}
    assert spec_of(tmp_path, "qwen2", rope_scaling=told).rope == RopeSpec(
        10000.0,
        "yarn",
        4.0,
        original_max_position=32768,
        beta_fast=20.0,
        beta_slow=2.0,
        attention_factor=2.0,
        truncate=False,
    )
    balanced = {**yarn, "mscale": 1.0, "mscale_all_dim": 1.0}
    assert spec_of(tmp_path, "qwen2", rope_scaling=balanced).rope.attention_factor == 1.0


@pytest.mark.parametrize(
    ("model_type", "settings", "message"),
    [
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported.*cannot follow"),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters: rope type 'longrope'"),
        ("llama", {"rope_parameters": [1]}, "rope_parameters is \\[1\\], not an object"),
        ("qwen2", {"rope_scaling": {"type": "yarn", "factor": -1}}, "factor is -1, not a number above 0"),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "llama4"}}},
            "rope_parameters: sliding_attention: rope type 'llama4'",
        ),
        ("gemma3_text", {"layer_types": ["full_attention"]}, "layer_types is .*, not a list of 4 times"),
        ("gemma3_text", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
        ("gemma3_text", {"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported; only silu and gelu"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is set"),
        ("mistral", {"sliding_window": "all"}, "sliding_window is 'all', not a whole number"),
        ("opt", {"activation_function": "gelu"}, "activation_function 'gelu' is not supported; only relu"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine is false"),
        ("opt", {"ffn_dim": None}, "lacks ffn_dim"),
        ("mixtral", {}, "model_type 'mixtral' is not supported; this version knows llama, mistral, qwen2"),
    ],
)
def test_refusals_name_the_key(tmp_path: Path, model_type: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        spec_of(tmp_path, model_type, **settings)
    assert str(tmp_path / "config.json") in str(caught.value)
