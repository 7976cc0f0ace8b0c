"""Loading: each rank reads its slice, and what is missing or too much is named."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from models.gguf_files import Quant, write_gguf
from models.harness import World, oracle_logits, write_llama
from safetensors.torch import load_file, save_file

from fastserve_hpc.errors import ConfigError, ModelError
from fastserve_hpc.models import loader
from fastserve_hpc.models.loader import load_model
from fastserve_hpc.models.locate import ModelFiles
from fastserve_hpc.models.source_safetensors import INDEX, SINGLE, SafetensorsSource
from fastserve_hpc.models.spec import load_spec
from fastserve_hpc.parallel.single import SingleComm
from fastserve_hpc.parallel.topology import Topology

IDS = list(range(40))


def load(path: Path, topology: Topology | None = None) -> Any:
    spec = load_spec(path)
    return load_model(ModelFiles(path, "tiny"), spec, topology or Topology(), SingleComm(), torch.float32)


def change_tensors(directory: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) remove tensors of model.safetensors; underscores of the names stand for dots."""
    tensors = load_file(directory / SINGLE)
    names = {name.replace(".", "_"): name for name in tensors}
    for key, tensor in changes.items():
        if tensor is None:
            del tensors[names[key]]
        else:
            tensors[names.get(key, key)] = tensor
    save_file(tensors, directory / SINGLE)


def test_sharded_files_and_strays_beside_them(tmp_path: Path) -> None:
    oracle = write_llama(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    (tmp_path / "consolidated.safetensors").write_bytes(b"not a weight file")
    (tmp_path / "pytorch_model.bin").write_bytes(b"not a weight file")
    torch.testing.assert_close(World(tmp_path, 3, 2).forward([(0, 0, IDS)]), oracle_logits(oracle, IDS))


def test_missing_shard(tmp_path: Path) -> None:
    write_llama(tmp_path, max_shard_size="100KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=rf"{shard.name} is missing, but {INDEX} names it"):
        load(tmp_path)


def test_shard_cut_short(tmp_path: Path) -> None:
    write_llama(tmp_path, max_shard_size="100KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(ModelError, match=rf"{shard.name} is cut short or broken"):
        load(tmp_path)


def test_index_that_names_the_wrong_shard(tmp_path: Path) -> None:
    write_llama(tmp_path, max_shard_size="100KB")
    index = json.loads((tmp_path / INDEX).read_text())
    first, *_, last = sorted(set(index["weight_map"].values()))
    moved = next(name for name, shard in index["weight_map"].items() if shard == first)
    index["weight_map"][moved] = last
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=rf"{last}: tensor {moved} is not in that file"):
        load(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {"a": "../../x"}}', '{"weight_map": {"a": 1}}'])
def test_broken_index(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(ModelError, match=rf"{INDEX}.*weight_map"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("name", ["weights.pth", "adapter_model.bin", "tf_model.h5"])
def test_other_weight_files(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelError, match=rf"neither model\.safetensors nor .*: {name} is not read; save the model as"):
        SafetensorsSource(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor .*: copy the model again"):
        SafetensorsSource(tmp_path)


def test_missing_tensor(tmp_path: Path) -> None:
    write_llama(tmp_path)
    change_tensors(tmp_path, model_layers_1_mlp_up_proj_weight=None)
    with pytest.raises(
        ModelError, match=r"model\.safetensors: tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"
    ):
        load(tmp_path)


def test_misshapen_tensor(tmp_path: Path) -> None:
    write_llama(tmp_path)
    change_tensors(tmp_path, model_norm_weight=torch.ones(71))
    with pytest.raises(
        ModelError, match=r"model\.norm\.weight has shape \[71\], but the configuration makes it \[72\]"
    ):
        load(tmp_path)


def test_stored_dtypes_may_be_mixed_but_not_scaled_formats(tmp_path: Path) -> None:
    write_llama(tmp_path)
    weight = load_file(tmp_path / SINGLE)["model.layers.0.mlp.up_proj.weight"]
    change_tensors(tmp_path, model_layers_0_mlp_up_proj_weight=weight.to(torch.bfloat16))
    load(tmp_path)
    change_tensors(tmp_path, model_layers_0_mlp_up_proj_weight=weight.to(torch.float8_e4m3fn))
    with pytest.raises(ModelError, match=r"up_proj\.weight is stored as F8_E4M3"):
        load(tmp_path)


def test_left_over_tensor_of_a_layer_is_refused_others_are_not(tmp_path: Path) -> None:
    write_llama(tmp_path)
    change_tensors(
        tmp_path,
        **{
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6),
            "model.layers.9.self_attn.q_proj.weight": torch.ones(6),
            "value_head.weight": torch.ones(6),
        },
    )
    load(tmp_path)
    change_tensors(tmp_path, **{"model.layers.1.self_attn.q_norm.weight": torch.ones(12)})
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.q_norm\.weight has no use in this kind of model"):
        load(tmp_path)


def test_gguf_errors_use_the_names_in_the_file(tmp_path: Path) -> None:
    oracle = write_llama(tmp_path / "hf")
    del oracle.model.layers[1].mlp.up_proj
    path = tmp_path / "tiny.gguf"
    write_gguf(path, oracle)
    with pytest.raises(ModelError, match=r"tiny\.gguf: tensor blk\.1\.ffn_up\.weight is missing"):
        load(path)


def test_tp_that_cannot_share_the_heads_and_too_many_stages(tmp_path: Path) -> None:
    write_llama(tmp_path)
    with pytest.raises(ModelError, match="use one of 1, 3, 6"):
        load(tmp_path, Topology(0, tp_size=4))
    with pytest.raises(ConfigError, match="3 layers: use --pp 3 or less"):
        load(tmp_path, Topology(0, num_stages=4))


@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_ranks_read_their_slices_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Over all ranks each matrix is read once; nobody asks for more than its part."""
    oracle = write_llama(tmp_path / "hf", hidden_size=96, intermediate_size=192, vocab_size=132)
    write_gguf(tmp_path / "tiny.gguf", oracle, Quant.Q8_0)
    path = tmp_path / ("hf" if kind == "hf" else "tiny.gguf")
    numbers: Counter[str] = Counter()
    open_source = loader.open_source

    def counting(files: Any, spec: Any) -> Any:
        source = open_source(files, spec)
        read = source.read

        def counted(name: str, rows: range, columns: range) -> torch.Tensor:
            part: torch.Tensor = read(name, rows, columns)
            numbers[name] += part.numel()
            return part

        monkeypatch.setattr(source, "read", counted)
        return source

    monkeypatch.setattr(loader, "open_source", counting)
    matrices = {n: p.numel() for n, p in oracle.named_parameters() if p.dim() == 2}
    for rank in range(6):
        numbers.clear()
        load(path, Topology(rank, tp_size=3, num_stages=2))
        assert sum(numbers[n] for n in matrices) <= 0.25 * sum(matrices.values())
        for name in numbers.keys() & matrices.keys():
            assert numbers[name] * 3 == matrices[name]
