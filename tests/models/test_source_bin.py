"""Weights in .bin files: what is a weight is read, in parts; whatever else is in them never runs."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from models.harness import World, oracle_logits, write_llama
from safetensors.torch import load_file
from torch import Tensor

from fastserve_hpc.errors import ModelError
from fastserve_hpc.models.loader import open_source
from fastserve_hpc.models.locate import ModelFiles
from fastserve_hpc.models.source_bin import INDEX, SINGLE, BinSource
from fastserve_hpc.models.spec import load_spec

IDS = list(range(40))


@pytest.fixture
def tensors(tmp_path: Path) -> dict[str, Tensor]:
    """Those of a tiny Llama in `tmp_path`, whose safetensors file is taken away."""
    write_llama(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    return stored


def write_shards(directory: Path, tensors: dict[str, Tensor]) -> None:
    files = {name: f"pytorch_model-{1 + number % 2:05}-of-00002.bin" for number, name in enumerate(tensors)}
    for file in set(files.values()):
        torch.save({name: tensor for name, tensor in tensors.items() if files[name] == file}, directory / file)
    (directory / INDEX).write_text(json.dumps({"weight_map": files}))


@pytest.mark.parametrize("form", ["archive", "old", "shards", "transposed", "base model"])
def test_logits_equal_transformers(tmp_path: Path, form: str) -> None:
    oracle = write_llama(tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    if form == "shards":
        write_shards(tmp_path, tensors)
    elif form == "transposed":
        torch.save({name: t.T.contiguous().T if t.dim() == 2 else t for name, t in tensors.items()}, tmp_path / SINGLE)
    elif form == "base model":
        torch.save({name.removeprefix("model."): t for name, t in tensors.items()}, tmp_path / SINGLE)
    else:
        torch.save(tensors, tmp_path / SINGLE, _use_new_zipfile_serialization=form == "archive")
    torch.testing.assert_close(World(tmp_path, 3, 2).forward([(0, 0, IDS)]), oracle_logits(oracle, IDS))


def test_safetensors_come_first(tmp_path: Path) -> None:
    write_llama(tmp_path)
    (tmp_path / SINGLE).write_bytes(b"not a weight file")
    source = open_source(ModelFiles(tmp_path, "tiny"), load_spec(tmp_path))
    assert "model.safetensors" in source.place("model.norm.weight")


class Bomb:
    def __reduce__(self) -> Any:
        return (print, ("this ran",))


@pytest.mark.parametrize("archive", [True, False])
def test_code_in_a_file_does_not_run(
    tmp_path: Path, tensors: dict[str, Tensor], capsys: pytest.CaptureFixture[str], archive: bool
) -> None:
    torch.save({**tensors, "extra": Bomb()}, tmp_path / SINGLE, _use_new_zipfile_serialization=archive)
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is broken, or holds more than weights"):
        BinSource(tmp_path)
    (tmp_path / SINGLE).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ModelError, match=r"pytorch_model\.bin"):
        BinSource(tmp_path)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("archive", [True, False])
@pytest.mark.parametrize("left", [0, 1, 100, -10])
def test_files_cut_short(tmp_path: Path, tensors: dict[str, Tensor], archive: bool, left: int) -> None:
    torch.save(tensors, tmp_path / SINGLE, _use_new_zipfile_serialization=archive)
    (tmp_path / SINGLE).write_bytes((tmp_path / SINGLE).read_bytes()[:left])
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is (cut short or )?broken"):
        BinSource(tmp_path)


def test_what_is_missing_or_strange_is_named(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    write_shards(tmp_path, tensors)
    first, second = sorted(tmp_path.glob("*.bin"))
    torch.save({"another.weight": torch.ones(3)}, first)
    torch.save([1], second)
    source = BinSource(tmp_path)
    in_first, in_second = (next(n for n in source.names if file.name in source.place(n)) for file in (first, second))
    with pytest.raises(ModelError, match=rf"{first.name}: tensor .* is not in that file"):
        source.shape(in_first)
    with pytest.raises(ModelError, match=rf"{second.name} holds no named weights"):
        source.shape(in_second)
    second.unlink()
    with pytest.raises(ModelError, match=rf"{second.name} is missing, but {INDEX} names it"):
        source.shape(in_second)
    (tmp_path / INDEX).unlink()
    torch.save({"model.norm.weight": torch.ones(72, dtype=torch.int8)}, tmp_path / SINGLE)
    with pytest.raises(ModelError, match=r"tensor model\.norm\.weight is stored as torch\.int8"):
        BinSource(tmp_path).read("model.norm.weight", range(72), range(72))
