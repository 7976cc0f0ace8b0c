"""Paged attention against the definition, row by row: any mix of chunks and decodes, scattered blocks, shared heads."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastserve_hpc import ops
from fastserve_hpc.ops import Rope, reference, reference_attention

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]
CPU = torch.device("cpu")
LAYER, NUM_LAYERS = 1, 3


@pytest.fixture(params=DEVICES, ids=str)
def device(request: pytest.FixtureRequest) -> Any:
    if request.param.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param


@dataclass(frozen=True)
class Slices:
    """The attention part of a batch."""

    positions: Tensor
    slot_ids: Tensor
    query_start: Tensor
    query_lens: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    num_tokens: int


@dataclass(frozen=True)
class Case:
    """`shape`: (heads, kv_heads, head_dim, block_size); `slices`: (positions before, tokens now) of each sequence."""

    slices: list[tuple[int, int]]
    shape: tuple[int, int, int, int]
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    window: int = 0
    softcap: float = 0.0

    def check(self) -> None:
        """Store K and V, attend, and compare with the definition."""
        heads, kv_heads, head_dim, block_size = self.shape
        chosen = ops.for_device(self.device).ops
        torch.manual_seed(0)
        batch, histories = self._batch(), [self._random(past + now, 2, kv_heads, head_dim) for past, now in self.slices]
        num_blocks = int(batch.block_tables.max()) + 1
        cache = torch.full(
            (num_blocks, NUM_LAYERS, 2, kv_heads, block_size, head_dim), 3.5, dtype=self.dtype, device=self.device
        )
        cache[0] = torch.nan  # what tables are padded with is somebody's, and need not be numbers
        self._fill_past(cache, batch, histories)
        before = cache.clone()
        layer = cache[:, LAYER]
        new = torch.cat([kv[past:] for kv, (past, _) in zip(histories, self.slices, strict=True)])
        q = self._random(batch.num_tokens, heads, head_dim)
        plan = chosen.plan_attention(batch, layer)
        turned = chosen.rope_store(q, new[:, 0], new[:, 1], layer, plan, _no_rotation(head_dim, self.device))
        assert torch.equal(turned, q)
        found = chosen.paged_attention(q, layer, plan, 0.3, self.window, self.softcap)
        assert found.is_contiguous()
        tolerance = 1e-5 if self.dtype == torch.float32 else 3e-2
        torch.testing.assert_close(found.double(), self._expected(q, histories), rtol=tolerance, atol=tolerance)
        self._check_stored(before, cache, batch, new)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def _batch(self) -> Slices:
        block_size = self.shape[3]
        counts = [-(-(past + now) // block_size) for past, now in self.slices]
        order = (torch.randperm(sum(counts)) + 1).split(counts)
        tables = torch.nn.utils.rnn.pad_sequence(order, batch_first=True)
        positions = [torch.arange(past, past + now) for past, now in self.slices]
        slots = [
            table[p // block_size] * block_size + p % block_size for table, p in zip(order, positions, strict=True)
        ]
        lens = [now for _, now in self.slices]
        return Slices(
            positions=torch.cat(positions).to(self.device),
            slot_ids=torch.cat(slots).to(self.device),
            query_start=torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=self.device),
            query_lens=torch.tensor(lens, dtype=torch.int32, device=self.device),
            seq_lens=torch.tensor([sum(piece) for piece in self.slices], dtype=torch.int32, device=self.device),
            block_tables=tables.int().to(self.device),
            num_tokens=sum(lens),
        )

    def _fill_past(self, cache: Tensor, batch: Slices, histories: list[Tensor]) -> None:
        block_size = self.shape[3]
        for table, history, (past, _) in zip(batch.block_tables.tolist(), histories, self.slices, strict=True):
            for position in range(past):
                cache[table[position // block_size], LAYER, :, :, position % block_size] = history[position]

    def _expected(self, q: Tensor, histories: list[Tensor]) -> Tensor:
        heads, kv_heads = self.shape[:2]
        rows = iter(q.double())
        out = []
        for history, (past, now) in zip(histories, self.slices, strict=True):
            k, v = history.double().repeat_interleave(heads // kv_heads, dim=2).unbind(1)
            for position in range(past, past + now):
                seen = slice(max(0, position + 1 - self.window) if self.window else 0, position + 1)
                scores = torch.einsum("hd,shd->hs", next(rows), k[seen]) * 0.3
                if self.softcap:
                    scores = self.softcap * torch.tanh(scores / self.softcap)
                out.append(torch.einsum("hs,shd->hd", scores.softmax(-1), v[seen]))
        return torch.stack(out)

    def _check_stored(self, before: Tensor, cache: Tensor, batch: Slices, new: Tensor) -> None:
        """The new slots hold k and v, everything else is as before."""
        block_size = self.shape[3]
        for slot, kv in zip(batch.slot_ids.tolist(), new, strict=True):
            before[slot // block_size, LAYER, :, :, slot % block_size] = kv
        torch.testing.assert_close(cache, before, rtol=0, atol=0, equal_nan=True)


def _no_rotation(head_dim: int, device: torch.device) -> Rope:
    return Rope(torch.ones(500, head_dim // 2, device=device), torch.zeros(500, head_dim // 2, device=device))


CASES: dict[str, tuple[list[tuple[int, int]], tuple[int, int, int, int]]] = {
    "one token": ([(0, 1)], (4, 2, 8, 16)),
    "one decode": ([(40, 1)], (4, 2, 8, 16)),
    "one prompt": ([(0, 37)], (4, 2, 8, 16)),
    "a later chunk": ([(21, 19)], (4, 2, 8, 16)),
    "decodes up to a block's edge and over it": ([(15, 1), (16, 1), (14, 1), (31, 1)], (6, 2, 8, 16)),
    "chunks between decodes": ([(9, 1), (0, 5), (3, 1), (17, 18), (99, 1)], (6, 3, 10, 16)),
    "blocks of one": ([(5, 1), (0, 3), (2, 2)], (2, 1, 4, 1)),
    "odd blocks": ([(5, 1), (0, 13), (8, 2)], (5, 5, 6, 7)),
    "lengths far apart": ([(400, 1), (2, 1), (3, 1), (150, 1), (0, 1)], (3, 1, 8, 16)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_is_what_it_says(case: str, dtype: torch.dtype, device: torch.device) -> None:
    Case(*CASES[case], dtype=dtype, device=device).check()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("window", "softcap"), [(1, 0.0), (7, 0.0), (16, 0.7), (0, 0.7)])
def test_windows_and_caps(case: str, window: int, softcap: float, device: torch.device) -> None:
    Case(*CASES[case], device=device, window=window, softcap=softcap).check()


def test_what_lies_before_a_window_is_not_gathered() -> None:
    batch = Case([(399, 1), (350, 20)], (4, 2, 8, 16))._batch()
    layer = torch.zeros(int(batch.block_tables.max()) + 1, NUM_LAYERS, 2, 2, 16, 8)[:, LAYER]
    plan = reference_attention.plan_attention(batch, layer)
    (decodes,), (chunk,) = reference_attention.plan_slices(plan, layer, 33)
    assert decodes.mask.shape[-1] == 48  # positions 367..399 lie in 3 blocks
    assert chunk.mask.shape[-1] == 370 - 318 // 16 * 16


@settings(max_examples=40, deadline=None)
@given(
    slices=st.lists(st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(1, 20))), min_size=1, max_size=9),
    groups=st.sampled_from([(1, 1), (2, 1), (6, 3), (4, 4), (9, 3)]),
    head_dim=st.sampled_from([2, 6, 16]),
    block_size=st.integers(1, 17),
    window=st.integers(0, 45),
    softcap=st.sampled_from([0.0, 0.5]),
)
def test_any_mix(
    slices: list[tuple[int, int]],
    groups: tuple[int, int],
    head_dim: int,
    block_size: int,
    window: int,
    softcap: float,
) -> None:
    Case(slices, (*groups, head_dim, block_size), window=window, softcap=softcap).check()


def test_queries_and_keys_are_rotated_by_their_positions(device: torch.device) -> None:
    case = Case([(7, 1), (0, 3), (30, 2)], (4, 2, 8, 16), device=device)
    batch = case._batch()
    layer = torch.zeros(int(batch.block_tables.max()) + 1, 2, 2, 16, 8, device=device)
    q, k, v = case._random(6, 4, 8), case._random(6, 2, 8), case._random(6, 2, 8)
    angles = torch.randn(40, 4, device=device)
    plan = reference.plan_attention(batch, layer)
    turned = reference.rope_store(q, k, v, layer, plan, Rope(angles.cos(), angles.sin()))
    for row, (position, slot) in enumerate(zip([7, 0, 1, 2, 30, 31], batch.slot_ids.tolist(), strict=True)):
        cos, sin = angles[position : position + 1].cos(), angles[position : position + 1].sin()
        torch.testing.assert_close(turned[row], reference.rotate(q[row : row + 1], cos, sin)[0])
        torch.testing.assert_close(layer[slot // 16, 0, :, slot % 16], reference.rotate(k[row : row + 1], cos, sin)[0])
        assert torch.equal(layer[slot // 16, 1, :, slot % 16], v[row])


def test_decodes_are_split_so_that_a_gather_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_attention, "GATHER_BYTES", 2**15)
    case = Case([(past, 1) for past in range(0, 200, 5)], (4, 2, 8, 16))
    case.check()
    batch = case._batch()
    layer = torch.zeros(int(batch.block_tables.max()) + 1, NUM_LAYERS, 2, 2, 16, 8)[:, LAYER]
    groups, _ = reference_attention.plan_slices(reference_attention.plan_attention(batch, layer), layer, 0)
    assert len(groups) > 4
    assert all(group.pages.numel() * 16 * 8 * 4 <= 2**15 * 1.2 for group in groups)  # whole blocks round up
    assert sorted(row for group in groups for row in group.query_rows.tolist()) == list(range(40))
