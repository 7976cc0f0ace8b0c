"""Memory estimates and layouts, against numbers worked out by hand and by brute force."""

from __future__ import annotations

import dataclasses

import pytest
from model_specs import LLAMA_8B, LLAMA_70B, SMALL

from fastserve_hpc.errors import ConfigError
from fastserve_hpc.slurm.sizing import GIB, Layout, Workload, place, rank_need, suggest

BFLOAT16 = Workload("bfloat16", max_batch=64, max_model_len=8192)


def test_8b_on_one_rank() -> None:
    need = rank_need(LLAMA_8B, 1, 1, BFLOAT16)
    assert need.weight_bytes == pytest.approx(8.03e9 * 2, rel=0.001)  # its published size
    assert need.kv_token_bytes == 128 * 1024  # 32 layers x 2 x 8 heads x 128 x 2 bytes
    assert need.kv_tokens == 64 * 1024
    assert need.kv_bytes == 8 * GIB


def test_ranks_share_weights_and_cache() -> None:
    whole = rank_need(LLAMA_70B, 1, 1, BFLOAT16)
    assert whole.weight_bytes == pytest.approx(70.55e9 * 2, rel=0.001)
    for tp, pp in ((2, 1), (4, 1), (1, 4), (4, 4)):
        part = rank_need(LLAMA_70B, tp, pp, BFLOAT16)
        assert part.kv_token_bytes * tp * pp == whole.kv_token_bytes
        # The fullest stage has an embedding that the others lack.
        assert whole.weight_bytes <= part.weight_bytes * tp * pp <= whole.weight_bytes * 1.05


def test_more_ranks_than_kv_heads_hold_copies() -> None:
    assert rank_need(LLAMA_70B, 16, 1, BFLOAT16).kv_token_bytes == rank_need(LLAMA_70B, 8, 1, BFLOAT16).kv_token_bytes


def test_tied_embedding_counts_once_on_one_stage_and_twice_on_two() -> None:
    untied = dataclasses.replace(SMALL, tie_embeddings=False)
    embedding = SMALL.vocab_size * SMALL.hidden_size * 2
    assert rank_need(untied, 1, 1, BFLOAT16).weight_bytes == rank_need(SMALL, 1, 1, BFLOAT16).weight_bytes + embedding
    assert rank_need(untied, 1, 2, BFLOAT16) == rank_need(SMALL, 1, 2, BFLOAT16)


def test_room_must_hold_the_longest_request() -> None:
    assert Workload("float32", 1, None).kv_tokens(LLAMA_8B) == LLAMA_8B.max_position
    assert Workload("float32", 1, 10**6).kv_tokens(LLAMA_8B) == LLAMA_8B.max_position
    assert Workload("float32", 256, 100).kv_tokens(LLAMA_8B) == 25600


@pytest.mark.parametrize(
    ("spec", "memory", "slots", "nodes", "layout"),
    [
        (LLAMA_8B, 80 * GIB, 4, None, Layout(1, 1, 1)),
        (LLAMA_8B, 24 * GIB, 4, None, Layout(2, 1, 1)),
        (LLAMA_70B, 80 * GIB, 4, None, Layout(4, 1, 1)),
        (LLAMA_70B, 40 * GIB, 4, None, Layout(4, 2, 2)),
        (LLAMA_70B, 80 * GIB, 1, None, Layout(1, 3, 3)),
        (LLAMA_70B, 80 * GIB, 4, 2, Layout(2, 2, 2)),
        (LLAMA_70B, 141 * GIB, 8, None, Layout(2, 1, 1)),
    ],
)
def test_suggested_layouts(spec: object, memory: int, slots: int, nodes: int | None, layout: Layout) -> None:
    assert suggest(spec, BFLOAT16, memory, slots, nodes) == layout  # type: ignore[arg-type]


def test_suggestion_fits_and_half_of_it_does_not() -> None:
    for memory_gib in range(16, 100, 7):
        layout = suggest(LLAMA_70B, BFLOAT16, memory_gib * GIB, 4, None)

        def fits(tp: int, pp: int, memory: int = memory_gib * GIB) -> bool:
            return rank_need(LLAMA_70B, tp, pp, BFLOAT16).total_bytes <= memory * 0.9

        assert fits(layout.tp, layout.pp)
        assert layout.pp == 1 or not fits(layout.tp, layout.pp - 1)
        assert layout.tp == 1 or layout.pp > 1 or not fits(layout.tp // 2, 1)


def test_hopeless_gpus_are_named() -> None:
    with pytest.raises(ConfigError, match=r"llama-70b.* fits on no number of GPUs of 2\.0 GiB"):
        suggest(LLAMA_70B, BFLOAT16, 2 * GIB, 4, None)


@pytest.mark.parametrize(
    ("tp", "pp", "slots", "nodes", "expected"),
    [
        (4, 2, 4, None, Layout(4, 2, 2)),
        (4, 2, 8, None, Layout(4, 2, 1)),
        (2, 3, 4, None, Layout(2, 3, 3)),  # two stages would fit on a node, but leave the second half empty
        (2, 4, 4, 4, Layout(2, 4, 4)),
        (3, 2, None, None, Layout(3, 2, 1)),
        (1, 2, None, 2, Layout(1, 2, 2)),
    ],
)
def test_placing(tp: int, pp: int, slots: int | None, nodes: int | None, expected: Layout) -> None:
    layout = place(tp, pp, slots, nodes)
    assert layout == expected
    assert layout.ranks_per_node * layout.nodes == tp * pp
    assert layout.ranks_per_node % tp == 0


def test_placing_never_splits_a_stage() -> None:
    with pytest.raises(ConfigError, match="use --tp 4 or less"):
        place(8, 1, 4, None)
    with pytest.raises(ConfigError, match="use --nodes 2, 4"):
        place(4, 4, 8, 3)
