"""What is said of a model before it is loaded (memory for Slurm, the simulator's shape) is what loading it takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from models.families import TINY

from fastserve_hpc.models.spec import load_spec
from fastserve_hpc.sim.shapes import find_shape
from fastserve_hpc.slurm.sizing import Workload, rank_need

FLOAT32 = Workload("float32", max_batch=1, max_model_len=64)


@pytest.mark.parametrize("name", TINY)
def test_every_family(tmp_path: Path, name: str) -> None:
    oracle = TINY[name].write(tmp_path)
    spec, shape = load_spec(tmp_path), find_shape(str(tmp_path))
    matrices = {n: p.numel() for n, p in oracle.named_parameters() if p.dim() == 2}
    need = rank_need(spec, 1, 1, FLOAT32)
    unused = 2 * spec.hidden_size if spec.rope is None else 0  # rows before the first position's
    assert need.weight_bytes / 4 == sum(matrices.values()) - unused
    assert shape.kv_bytes_per_token == need.kv_token_bytes / 2  # of two bytes a number there
    layers = sum(count for n, count in matrices.items() if ".layers." in n)
    assert shape.num_parameters == layers + spec.vocab_size * spec.hidden_size
