"""Specs hold what the files say; what this decoder does not compute is refused, naming file and key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastserve_hpc.errors import ModelError
from fastserve_hpc.models.locate import locate
from fastserve_hpc.models.spec import ModelSpec, RopeSpec, load_spec

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 99,
    "vocab_size": 131,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def spec_of(directory: Path, **changes: Any) -> ModelSpec:
    (directory / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return load_spec(directory)


def test_config_json(tmp_path: Path) -> None:
    assert spec_of(tmp_path) == ModelSpec(
        name=tmp_path.name,
        architecture="llama",
        num_layers=3,
        hidden_size=64,
        num_heads=8,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=99,
        vocab_size=131,
        max_position=512,
        norm_eps=1e-5,
        rope=RopeSpec(5000.0),
        tie_embeddings=False,
        dtype="bfloat16",
        eos_token_ids=(2,),
    )


def test_smollm2_gguf() -> None:
    spec = load_spec(locate("smollm2-135m").path)
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads) == (30, 576, 9, 3)
    assert (spec.head_dim, spec.intermediate_size, spec.vocab_size, spec.max_position) == (64, 1536, 49152, 8192)
    assert spec.rope == RopeSpec(100000.0)
    assert spec.tie_embeddings
    assert spec.eos_token_ids == (2,)
    assert spec.norm_eps == pytest.approx(1e-5)


def test_what_config_json_leaves_out(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, num_key_value_heads=None, head_dim=6, rope_theta=None, eos_token_id=None)
    assert (spec.num_kv_heads, spec.head_dim, spec.rope.theta, spec.eos_token_ids) == (8, 6, 10000.0, ())


def test_generation_config_has_the_last_word_on_end_tokens(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert spec_of(tmp_path).eos_token_ids == (7, 9)
    (tmp_path / "generation_config.json").write_text("{}")
    assert spec_of(tmp_path).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeSpec(5000.0, "linear", 2.0)),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, RopeSpec(5000.0, "llama3", 8.0, 1.0, 4.0, 64)),
        (
            {"rope_theta": None, "rope_parameters": {"rope_type": "llama3", "rope_theta": 7.0, **LLAMA3}},
            RopeSpec(7.0, "llama3", 8.0, 1.0, 4.0, 64),
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, RopeSpec(7.0)),
    ],
)
def test_rope_under_old_and_new_keys(tmp_path: Path, changes: dict[str, Any], rope: RopeSpec) -> None:
    assert spec_of(tmp_path, **changes).rope == rope


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported; this version knows llama"),
        ({"architectures": ["LlamaForTokenClassification"]}, "only LlamaForCausalLM generates text"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling: rope type 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "rope_scaling lacks low_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor is 0, not a number above 0"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is set"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is set"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5, not a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_attention_heads": 9}, "hidden_size 64 is not a multiple of num_attention_heads 9"),
        ({"num_key_value_heads": 3}, "8 heads are not a multiple of 3 KV heads"),
        ({"head_dim": 7}, "head size 7 is odd"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
    ],
)
def test_refusals_name_file_and_key(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        spec_of(tmp_path, **changes)
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize("content", ["", "{", "[]", "\udcff"])
def test_broken_config_json_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError, match=r"config\.json is not"):
        load_spec(tmp_path)


def test_tp_sizes_share_out_all_heads(tmp_path: Path) -> None:
    assert spec_of(tmp_path, num_attention_heads=12, num_key_value_heads=4, head_dim=8).tp_sizes() == [1, 2, 4, 12]
    spec = spec_of(tmp_path)
    spec.check_tp(4)
    with pytest.raises(ModelError, match=r"--tp 3 .* 8 heads and 2 KV heads .* use one of 1, 2, 4, 8"):
        spec.check_tp(3)
