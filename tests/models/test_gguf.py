"""GGUF: headers are read strictly, weights are the numbers that were stored."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models.gguf_files import Quant, write_gguf
from models.harness import World, oracle_logits, write_llama

from fastserve_hpc.errors import ModelError
from fastserve_hpc.models.gguf import TENSOR_TYPES, read_header
from fastserve_hpc.models.source_gguf import GGUFSource
from fastserve_hpc.models.spec import ModelSpec, RopeSpec

SIZES = {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2}
"""Rows of whole 32-blocks, also where three ranks share the columns: 160 / 3 cuts through blocks."""

SPEC = ModelSpec(
    name="tiny",
    architecture="llama",
    num_layers=1,
    hidden_size=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    intermediate_size=8,
    vocab_size=5,
    max_position=16,
    norm_eps=1e-5,
    rope=RopeSpec(10000.0),
    tie_embeddings=False,
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole file of a few kilobytes with all kinds of metadata."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.uint8", 200)
    writer.add_int64("a.int64", -(2**40))
    writer.add_float64("a.float64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "Ġ 好")
    writer.add_array("a.numbers", [1.5, 2.5])
    writer.add_array("a.strings", ["", "x", "好"])
    writer.add_tensor("matrix", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("vector", np.arange(5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_header_holds_what_was_written(small: Path) -> None:
    header = read_header(small)
    assert header.metadata == {
        "general.architecture": "llama",
        "a.uint8": 200,
        "a.int64": -(2**40),
        "a.float64": 0.1,
        "a.bool": True,
        "a.string": "Ġ 好",
        "a.numbers": [1.5, 2.5],
        "a.strings": ["", "x", "好"],
    }
    matrix, vector = header.tensors["matrix"], header.tensors["vector"]
    assert (matrix.shape, matrix.type.name, matrix.nbytes) == ((2, 3), "F32", 24)
    data = small.read_bytes()
    assert np.frombuffer(data[vector.offset : vector.offset + vector.nbytes], np.float32).tolist() == [0, 1, 2, 3, 4]


def test_types_have_the_sizes_of_the_gguf_package() -> None:
    for number, kind in TENSOR_TYPES.items():
        assert gguf.GGML_QUANT_SIZES[Quant(number)] == (kind.block_size, kind.block_bytes)
        assert Quant(number).name == kind.name


def test_a_file_cut_short_anywhere_is_refused(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    last = read_header(small).tensors["vector"]
    cut = tmp_path / "cut.gguf"
    for length in range(last.offset + last.nbytes):
        cut.write_bytes(data[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            read_header(cut)


def test_a_missing_tail_names_the_tensor(small: Path, tmp_path: Path) -> None:
    last = read_header(small).tensors["vector"]
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(small.read_bytes()[: last.offset + last.nbytes - 1])
    with pytest.raises(ModelError, match="'vector' ends at byte"):
        read_header(cut)


@settings(max_examples=300, deadline=None)
@given(changes=st.lists(st.tuples(st.integers(0, 600), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4))
def test_garbage_is_refused_or_harmless(small: Path, changes: list[tuple[int, bytes]]) -> None:
    data = bytearray(small.read_bytes())
    for position, replacement in changes:
        data[position : position + len(replacement)] = replacement
    broken = small.with_name("broken.gguf")
    broken.write_bytes(data)
    with suppress(ModelError):
        header = read_header(broken)
        assert all(info.offset + info.nbytes <= len(data) for info in header.tensors.values())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"PK\x03\x04", "does not start with 'GGUF'"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "cut short or broken"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 99), "'k' has unknown type 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + struct.pack("<Q1sIB", 1, b"k", 0, 5) * 2, "'k' appears twice"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 64, 77, 0), "'t' has type number 77"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 33, 8, 0), "'t' has rows of 33"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"t", 9), "'t' has 9 dimensions"),
    ],
)
def test_broken_headers_say_what_is_wrong(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        read_header(path)


@pytest.mark.parametrize("kind", [Quant.F32, Quant.F16, Quant.BF16, Quant.Q8_0, Quant.Q4_0, Quant.Q4_1, Quant.Q5_1])
def test_logits_equal_transformers(tmp_path: Path, kind: Quant) -> None:
    oracle = write_llama(tmp_path / "hf", **SIZES)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, oracle, kind)
    ids = list(range(0, 130, 3))
    expected = oracle_logits(oracle, ids)
    for tp_size in (1, 3, 6):
        logits = World(path, tp_size).forward([(0, 0, ids)])
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_biases_are_in_the_order_of_their_rows(tmp_path: Path) -> None:
    oracle = write_llama(tmp_path / "hf", attention_bias=True, mlp_bias=True, **SIZES)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, oracle)
    ids = list(range(50))
    logits = World(path, tp_size=3).forward([(0, 0, ids)])
    torch.testing.assert_close(logits, oracle_logits(oracle, ids), rtol=1e-4, atol=1e-4)


def test_rope_factors_are_llama3_scaling(tmp_path: Path) -> None:
    """The converter turns llama3 scaling into a tensor of divisors."""
    rope = {"rope_type": "llama3", "rope_theta": 1000.0, "factor": 4.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    oracle = write_llama(tmp_path / "hf", rope_parameters=rope, **SIZES)
    unscaled = 1.0 / 1000.0 ** (torch.arange(0, 16, 2) / 16)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, oracle, extra={"rope_freqs.weight": unscaled / oracle.model.rotary_emb.inv_freq})
    ids = list(range(130))
    logits = World(path).forward([(0, 0, ids)])
    torch.testing.assert_close(logits, oracle_logits(oracle, ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [kind for kind in TENSOR_TYPES.values() if kind.block_size > 1], ids=lambda k: k.name)
def test_parts_of_every_quantised_type(tmp_path: Path, kind: Any) -> None:
    """Random blocks of each type; columns that begin and end inside a block."""
    rng = np.random.default_rng(1)
    blocks = 3 * 256 // kind.block_size
    data = rng.integers(0, 32, (5, blocks * kind.block_bytes), np.uint8)  # small bytes are finite scales
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("matrix", data, raw_dtype=Quant[kind.name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = GGUFSource(read_header(path), SPEC)
    whole = torch.from_numpy(gguf.quants.dequantize(data, Quant[kind.name]))
    assert torch.equal(source.read("matrix", range(1, 4), range(77, 515)), whole[1:4, 77:515])
    assert torch.equal(source.read("matrix", range(5), range(768)), whole)
