"""Tiny random Llamas equal transformers': whole, chunked, mixed, tensor-parallel, in stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models.harness import World, oracle_choices, oracle_logits, write_llama

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 6},
    "mqa": {"num_key_value_heads": 1},
    "one layer, tied": {"num_hidden_layers": 1, "tie_word_embeddings": True},
    "head size apart from hidden size": {"head_dim": 10},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "large eps, small theta": {"rms_norm_eps": 0.1, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}},
    "llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
}
WORLDS = [(2, 1), (3, 1), (6, 1), (1, 2), (1, 3), (3, 2)]


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 131, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(tmp_path: Path, variant: str) -> None:
    oracle = write_llama(tmp_path, **VARIANTS[variant])
    ids = tokens(99)
    torch.testing.assert_close(World(tmp_path).forward([(0, 0, ids)]), oracle_logits(oracle, ids), **TOLERANCE)


@pytest.mark.parametrize("variant", ["gqa", "llama3 rope"])
def test_greedy_ids_equal_transformers(tmp_path: Path, variant: str) -> None:
    oracle = write_llama(tmp_path, **VARIANTS[variant])
    prompts = [tokens(n, seed=n) for n in (1, 19, 64)]
    answers = World(tmp_path).generate(prompts, 64)
    assert answers == [oracle_choices(oracle, p, answer) for p, answer in zip(prompts, answers, strict=True)]


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunked_prefill_equals_whole(tmp_path: Path, chunk: int) -> None:
    oracle = write_llama(tmp_path)
    ids, world = tokens(99), World(tmp_path, block_size=5)
    pieces = [world.forward([(2, start, ids[start : start + chunk])]) for start in range(0, len(ids), chunk)]
    torch.testing.assert_close(torch.cat(pieces), oracle_logits(oracle, ids), **TOLERANCE)


def test_chunks_and_decodes_of_many_sequences_in_one_batch(tmp_path: Path) -> None:
    oracle = write_llama(tmp_path)
    prompts = [tokens(n, seed=n) for n in (1, 2, 16, 17, 99, 150, 200, 33)]
    expected = [oracle_logits(oracle, ids) for ids in prompts]
    world = World(tmp_path)
    done = [0] * len(prompts)
    sizes = torch.Generator().manual_seed(5)
    while any(start < len(ids) for start, ids in zip(done, prompts, strict=True)):
        pieces = []
        for i, ids in enumerate(prompts):
            count = int(torch.randint(-1, 40, (), generator=sizes))
            count = 1 if count % 3 == 0 else count  # decodes, chunks, and some who wait
            if count > 0 and done[i] < len(ids):
                pieces.append((i, done[i], ids[done[i] : done[i] + count]))
        if not pieces:
            continue
        rows = world.forward(pieces).split([len(ids) for _, _, ids in pieces])
        for (i, start, ids), logits in zip(pieces, rows, strict=True):
            torch.testing.assert_close(logits, expected[i][start : start + len(ids)], **TOLERANCE)
            done[i] += len(ids)


@pytest.mark.parametrize(("tp_size", "num_stages"), WORLDS)
@pytest.mark.parametrize("biases", [False, True])
def test_ranks_together_equal_transformers(tmp_path: Path, biases: bool, tp_size: int, num_stages: int) -> None:
    """131 ids and 97 inner units divide by none of the tp sizes; with tp 6 ranks share KV heads."""
    kv_heads = 2 if tp_size == 2 else 3
    oracle = write_llama(tmp_path, num_key_value_heads=kv_heads, attention_bias=biases, mlp_bias=biases)
    world = World(tmp_path, tp_size, num_stages)
    ids = tokens(40)
    first = world.forward([(0, 0, ids[:33]), (1, 0, ids[:7])])
    expected = oracle_logits(oracle, ids)
    torch.testing.assert_close(first, torch.cat((expected[:33], expected[:7])), **TOLERANCE)
    second = world.forward([(1, 7, ids[7:8]), (0, 33, ids[33:])])
    torch.testing.assert_close(second, torch.cat((expected[7:8], expected[33:])), **TOLERANCE)


def test_tied_embeddings_over_stages_and_ranks(tmp_path: Path) -> None:
    oracle = write_llama(tmp_path, tie_word_embeddings=True)
    ids = tokens(20)
    logits = World(tmp_path, tp_size=3, num_stages=2).forward([(0, 0, ids)])
    torch.testing.assert_close(logits, oracle_logits(oracle, ids), **TOLERANCE)


def test_ranks_without_a_part_of_the_vocabulary(tmp_path: Path) -> None:
    oracle = write_llama(tmp_path, vocab_size=7)
    ids = [6, 0, 3, 5]
    logits = World(tmp_path, tp_size=6).forward([(0, 0, ids)])
    torch.testing.assert_close(logits, oracle_logits(oracle, ids), **TOLERANCE)


def test_stages_change_no_bit_in_bfloat16(tmp_path: Path) -> None:
    write_llama(tmp_path)
    ids = tokens(50)
    one, two = (World(tmp_path, num_stages=n, dtype=torch.bfloat16).forward([(0, 0, ids)]) for n in (1, 2))
    assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near(tmp_path: Path, dtype: torch.dtype) -> None:
    oracle = write_llama(tmp_path)
    ids = tokens(50)
    logits = World(tmp_path, dtype=dtype).forward([(0, 0, ids)])
    expected = oracle_logits(oracle, ids)
    assert (logits - expected).norm() < (0.05 if dtype == torch.bfloat16 else 0.01) * expected.norm()


def test_only_the_rows_that_are_asked_for_are_returned(tmp_path: Path) -> None:
    write_llama(tmp_path)
    world = World(tmp_path)
    batch = world.tables.batch([(0, 0, tokens(9)), (1, 0, tokens(4))])
    full = world.models[0].forward(batch, world.caches[0])
    for rows in ([8, 12], [3], []):
        batch = type(batch)(**{**vars(batch), "sample_rows": torch.tensor(rows, dtype=torch.int64)})
        torch.testing.assert_close(world.models[0].forward(batch, world.caches[0]), full[rows])


def test_progress_is_called_between_layers(tmp_path: Path) -> None:
    write_llama(tmp_path)
    world = World(tmp_path, num_stages=2)
    world.forward([(0, 0, [1, 2, 3])])
    num_layers = [len(topology.layer_range(3)) for topology in world.topologies]
    assert world.shared.num_progress_calls == num_layers
