"""The two tiers: layout, sizes, and copies against a plain reference."""

from __future__ import annotations

import resource
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastserve_hpc.core.plan import BlockCopy
from fastserve_hpc.errors import ConfigError
from fastserve_hpc.models.spec import ModelSpec, RopeSpec
from fastserve_hpc.parallel.topology import Topology
from fastserve_hpc.worker.copies import measure, runs
from fastserve_hpc.worker.kv_cache import KVCache, KVShape, KVSize, choose_size

CPU = torch.device("cpu")
SHAPE = KVShape(num_layers=3, num_kv_heads=2, block_size=4, head_dim=5, dtype=torch.bfloat16)
SPEC = ModelSpec(
    name="tiny",
    architecture="llama",
    num_layers=7,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=64,
    vocab_size=100,
    max_position=128,
    norm_eps=1e-5,
    rope=RopeSpec(theta=10000.0),
    tie_embeddings=True,
)


def test_block_is_one_contiguous_piece_and_a_layer_is_a_view() -> None:
    kv = KVCache(SHAPE, KVSize(6, 2), CPU)
    assert kv.device_tier.shape == (6, 3, 2, 2, 4, 5)
    assert kv.host_tier.shape == (2, 3, 2, 2, 4, 5)
    assert kv.device_tier.dtype == torch.bfloat16
    assert kv.device_tier[4].is_contiguous()
    layer = kv.layer(1)
    assert layer.shape == (6, 2, 2, 4, 5)
    layer[4, 1, 0, 3, 2] = 7
    assert kv.device_tier[4, 1, 1, 0, 3, 2] == 7
    assert kv.device_tier.count_nonzero() == 1
    assert kv.device_tier[0].numel() * 2 == SHAPE.block_bytes


def test_a_cache_takes_memory_for_its_first_blocks_alone() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    shape = KVShape(num_layers=8, num_kv_heads=8, block_size=16, head_dim=64, dtype=torch.float32)
    kv = KVCache(shape, KVSize(4096, 4096), CPU)
    assert kv.device_tier.nbytes == 2**31
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 612 * 1024


def test_blocks_are_aligned_for_vector_loads() -> None:
    kv = KVCache(SHAPE, KVSize(3, 3), CPU)
    assert kv.device_tier.data_ptr() % 64 == 0
    assert kv.host_tier.data_ptr() % 64 == 0


def test_zero_blocks_on_the_host_are_allowed() -> None:
    assert KVCache(SHAPE, KVSize(2, 0), CPU).host_tier.shape[0] == 0


def test_share_of_a_rank() -> None:
    def shape(rank: int, tp: int, pp: int) -> KVShape:
        return KVShape.of(SPEC, Topology(rank, tp, pp), 16, torch.float32)

    assert shape(0, 1, 1) == KVShape(7, 2, 16, 8, torch.float32)
    assert shape(1, 2, 1).num_kv_heads == 1
    assert shape(3, 4, 1).num_kv_heads == 1
    assert sum(shape(rank, 1, 2).num_layers for rank in range(2)) == 7


def test_budgets_in_bytes_give_whole_blocks() -> None:
    per_block = SHAPE.block_bytes
    size = choose_size(SHAPE, 10 * per_block + 1, 4 * per_block - 1, free_bytes=0, max_batch=1, max_model_len=40)
    assert size == KVSize(10, 3)


def test_default_is_what_the_batch_can_use_where_memory_is_ample() -> None:
    size = choose_size(SHAPE, None, None, free_bytes=2**40, max_batch=8, max_model_len=41)
    assert size == KVSize(8 * 11, 8 * 11)


def test_default_leaves_half_of_memory_that_both_tiers_share() -> None:
    free = 100 * SHAPE.block_bytes
    size = choose_size(SHAPE, None, None, free_bytes=free, max_batch=8, max_model_len=40)
    assert size == KVSize(25, 25)
    assert choose_size(SHAPE, None, 0, free_bytes=free, max_batch=8, max_model_len=40) == KVSize(50, 0)
    host_kv = 30 * SHAPE.block_bytes
    assert choose_size(SHAPE, None, host_kv, free_bytes=free, max_batch=8, max_model_len=40) == KVSize(20, 30)


@pytest.mark.parametrize(("host_blocks_free", "host"), [(1000, 90), (60, 30)])
def test_default_on_a_device_with_its_own_memory(host_blocks_free: int, host: int) -> None:
    size = choose_size(
        SHAPE,
        None,
        None,
        free_bytes=100 * SHAPE.block_bytes,
        max_batch=50,
        max_model_len=40,
        host_free_bytes=host_blocks_free * SHAPE.block_bytes,
    )
    assert size == KVSize(90, host)


@pytest.mark.parametrize(("device_kv", "place"), [(None, "bytes free"), (SHAPE.block_bytes - 1, "--device-kv")])
def test_no_room_for_one_block_is_refused_with_a_cure(device_kv: int | None, place: str) -> None:
    with pytest.raises(ConfigError, match=f"{place}.*no room for one KV block.*--block-size"):
        choose_size(SHAPE, device_kv, None, free_bytes=SHAPE.block_bytes, max_batch=8, max_model_len=40)


def filled(num_device: int, num_host: int) -> KVCache:
    kv = KVCache(KVShape(1, 1, 1, 1, torch.float32), KVSize(num_device, num_host), CPU)
    kv.device_tier.view(-1, 2)[:] = torch.arange(num_device)[:, None] + 100
    kv.host_tier.view(-1, 2)[:] = torch.arange(num_host)[:, None] + 200
    return kv


def wait_until_done(kv: KVCache, copy_id: int) -> None:
    deadline = time.monotonic() + 10
    while kv.copies_done() < copy_id:
        assert time.monotonic() < deadline
        time.sleep(1e-4)


rounds = st.lists(
    st.tuples(st.permutations(range(8)), st.permutations(range(8)), st.lists(st.booleans(), max_size=8)), max_size=3
)


@settings(max_examples=100, deadline=None)
@given(rounds, st.integers(0, 8))
def test_copies_move_what_they_name_whatever_runs_they_make(
    moves: list[tuple[list[int], list[int], list[bool]]], split: int
) -> None:
    """Within a round no slot is in two copies, as the coordinator has it."""
    kv = filled(8, 8)
    device, host = [100.0 + i for i in range(8)], [200.0 + i for i in range(8)]
    last = 0
    for device_slots, host_slots, directions in moves:
        numbered = []
        for d, h, up in zip(device_slots, host_slots, directions, strict=False):
            last += 1
            numbered.append(BlockCopy(last, d, h, up))
            if up:
                device[d] = host[h]
            else:
                host[h] = device[d]
        kv.copy(numbered[:split])
        kv.copy(numbered[split:])
        uploads = [copy for copy in numbered if copy.to_device]
        assert kv.wait_for(last) >= 0
        assert all(kv.device_tier.view(-1, 2)[c.device_slot, 0] == device[c.device_slot] for c in uploads)
        wait_until_done(kv, last)
    assert kv.copies_done() == last
    assert kv.device_tier.view(-1, 2)[:, 0].tolist() == device
    assert kv.host_tier.view(-1, 2)[:, 1].tolist() == host


def test_neighbours_are_copied_as_one_piece() -> None:
    slots = [(3, 5), (4, 6), (5, 7), (7, 8), (8, 9), (9, 11)]
    copies = [BlockCopy(i, d, h, True) for i, (d, h) in enumerate(slots, start=1)]
    assert [(first.device_slot, count) for first, count in runs(copies)] == [(3, 3), (7, 2), (9, 1)]


def test_an_upload_overtakes_offloads_and_is_waited_for_alone() -> None:
    kv = KVCache(KVShape(1, 1, 1024, 1024, torch.float32), KVSize(33, 33), CPU)
    kv.host_tier[32] = 7
    copies = [BlockCopy(i + 1, i, i, False) for i in range(32)]
    kv.copy([*copies, BlockCopy(33, 32, 32, True)])
    assert kv.wait_for(33) > 0
    assert kv.device_tier[32].mean() == 7
    wait_until_done(kv, 33)


def test_a_copy_that_fails_is_heard_of() -> None:
    kv = filled(4, 4)
    kv.copy([BlockCopy(1, 0, 99, True)])
    with pytest.raises(ValueError, match="broadcast"):
        kv.wait_for(1)
    with pytest.raises(ValueError, match="broadcast"):
        kv.copies_done()


def test_the_cost_of_a_copy_is_measured() -> None:
    kv = filled(4, 4)
    assert min(measure(kv.device_tier, kv.host_tier)) > 0
    assert measure(kv.device_tier, kv.host_tier[:0]) == (0.0, 0.0)


@pytest.mark.parametrize("copy_id", [1, 3])
def test_copy_that_is_missing_or_comes_twice_is_refused(copy_id: int) -> None:
    kv = filled(4, 4)
    kv.copy([BlockCopy(1, 0, 0, False)])
    with pytest.raises(ValueError, match=f"copy {copy_id} follows 1"):
        kv.copy([BlockCopy(copy_id, 1, 1, False)])
