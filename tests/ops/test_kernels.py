"""The C++ kernels as operations equal the torch reference within the rounding of bf16."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from models.harness import TinyBatch
from torch import Tensor

from fastserve_hpc.ops import Activation, LayerShape, LayerWeights, Norm, Ops, Rope, find_kernels, reference
from fastserve_hpc.ops.kernels import KernelOps

BLOCK_SIZE, HEAD_DIM = 16, 32


@pytest.fixture(scope="module")
def ops() -> KernelOps:
    kernels = find_kernels(BLOCK_SIZE, HEAD_DIM, 2)
    if isinstance(kernels, str):
        pytest.skip(kernels)
    return KernelOps(kernels)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def random(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def assert_near(found: Tensor, expected: Tensor, tolerance: float = 2**-7) -> None:
    """Within a few roundings of bf16 at the size of the largest number."""
    assert found.shape == expected.shape
    assert (found.float() - expected.float()).abs().max() <= tolerance * expected.float().abs().max()


@pytest.mark.parametrize("activation", ["none", "silu_mul", "gelu_tanh_mul", "relu"])
@pytest.mark.parametrize("rows", [1, 2, 19, 99])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(576, 64), (99, 38), (7, 2), (33, 130)])
def test_linear(ops: KernelOps, activation: Activation, rows: int, num_inputs: int, num_outputs: int) -> None:
    x = random(rows, num_inputs)
    weight, bias = random(num_outputs, num_inputs) / num_inputs**0.5, random(num_outputs)
    residual = random(rows, num_outputs)
    norm = Norm(torch.rand(num_inputs) + 0.5, 1e-5)
    layer_norm = Norm(torch.rand(num_inputs) + 0.5, 1e-5, torch.randn(num_inputs))
    given: dict[str, Any]
    packed, exact = ops.pack_linear(weight, bias, activation), (weight.float(), bias.float(), activation)
    with_residual = [] if activation != "none" else [{"residual": residual}, {"norm": norm, "residual": residual}]
    for given in ({}, {"norm": norm}, {"norm": layer_norm}, *with_residual):
        wide = {name: value.float() if isinstance(value, Tensor) else value for name, value in given.items()}
        expected = reference.linear(x.float(), reference.pack_linear(*exact), **wide)
        tolerance = 2**-5 if given.get("norm") is layer_norm else 2**-6  # the normalised x is rounded, too
        assert_near(ops.linear(x, packed, **given), expected, tolerance)
        assert ops.linear(x, packed, out_dtype=torch.float32, **given).dtype == torch.float32
    assert_near(ops.linear(x, ops.pack_linear(weight)), x.float() @ weight.float().T)


def test_layer_norm_takes_each_row_by_itself(ops: KernelOps) -> None:
    """The same bits in any batch, so that what is computed through it is reproducible."""
    torch.set_num_threads(2)
    x = random(700, 768)
    norm = Norm(torch.rand(768) + 0.5, 1e-5, torch.randn(768))
    whole = ops.normalize(x, norm)
    for rows in (slice(0, 1), slice(3, 20), slice(5, 500), slice(699, 700)):
        assert torch.equal(ops.normalize(x[rows], norm), whole[rows])


@pytest.mark.parametrize(("vocab_size", "hidden_size"), [(131, 72), (64, 576), (32, 33), (5, 1)])
def test_embedding_from_a_table_and_from_the_heads_weight(ops: KernelOps, vocab_size: int, hidden_size: int) -> None:
    table = random(vocab_size, hidden_size)
    ids = torch.tensor([0, vocab_size - 1, vocab_size // 2, 3, 3])
    for weight in (table, ops.pack_linear(table)):
        assert torch.equal(ops.embedding(ids, weight), table[ids])
        assert torch.equal(ops.embedding(ids, weight, 25.25), table[ids] * 25.25)
        for first_id in (0, 2, vocab_size):
            part = reference.embedding(ids, table, 25.25, first_id)
            assert torch.equal(ops.embedding(ids, weight, 25.25, first_id), part)


class Sequences:
    """Sequences of given lengths that bring their last tokens; blocks are shuffled."""

    def __init__(self, seq_lens: list[int], query_lens: list[int]):
        width = -(-max(seq_lens) // BLOCK_SIZE)
        self.num_blocks = len(seq_lens) * width
        tables = torch.randperm(self.num_blocks).view(len(seq_lens), width)
        self.positions = [torch.arange(n - q, n) for n, q in zip(seq_lens, query_lens, strict=True)]
        slots = [t[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for t, p in zip(tables, self.positions, strict=True)]
        self.batch = TinyBatch(
            token_ids=torch.zeros(sum(query_lens), dtype=torch.int64),
            positions=torch.cat(self.positions),
            slot_ids=torch.cat(slots),
            query_start=torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32),
            query_lens=torch.tensor(query_lens, dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_tables=tables.int(),
            sample_rows=torch.arange(sum(query_lens)),
            num_tokens=sum(query_lens),
        )


def rope_table(num_positions: int) -> Rope:
    angles = torch.rand(num_positions, HEAD_DIM // 2) * 6
    return Rope(angles.cos(), angles.sin())


def attend(
    ops: Ops, seq_lens: list[int], query_lens: list[int], heads: int, kv_heads: int, window: int, softcap: float
) -> Tensor:
    """Prefill of all but the queries, then the queries: rotated, stored, attended."""
    torch.manual_seed(1)
    rope = rope_table(max(seq_lens)) if softcap == 0 else None
    norms = [Norm(torch.rand(HEAD_DIM) + 0.5, 1e-5) if window else None for _ in range(2)]
    qkv = [random(n, heads + 2 * kv_heads, HEAD_DIM) for n in seq_lens]
    whole, last = Sequences(seq_lens, seq_lens), Sequences(seq_lens, query_lens)
    cache = torch.zeros(whole.num_blocks, 3, 2, kv_heads, BLOCK_SIZE, HEAD_DIM, dtype=torch.bfloat16)[:, 1]
    last.batch = replace(last.batch, block_tables=whole.batch.block_tables)
    slots = [s[-n:] for s, n in zip(whole.batch.slot_ids.split(seq_lens), query_lens, strict=True)]
    last.batch = replace(last.batch, slot_ids=torch.cat(slots))
    out = torch.empty(0)
    for batch, counts in ((whole.batch, seq_lens), (last.batch, query_lens)):
        rows = torch.cat([part[-n:] for part, n in zip(qkv, counts, strict=True)])
        q, k, v = rows.split([heads, kv_heads, kv_heads], dim=1)
        plan = ops.plan_attention(batch, cache)
        q = ops.rope_store(q, k, v, cache, plan, rope, *norms)
        out = ops.paged_attention(q, cache, plan, 0.2, window, softcap)
    return out


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (3, 3), (9, 3)])
@pytest.mark.parametrize(
    ("seq_lens", "query_lens"), [([1], [1]), ([19, 99, 1, 300], [1, 1, 1, 1]), ([130, 40, 17], [99, 1, 17])]
)
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (21, 0.0), (0, 0.9), (50, 0.9)])
def test_attention(
    ops: KernelOps,
    heads: int,
    kv_heads: int,
    seq_lens: list[int],
    query_lens: list[int],
    window: int,
    softcap: float,
) -> None:
    """With windows also norms of queries and keys, with caps no rotation: what families have."""
    found, expected = (attend(o, seq_lens, query_lens, heads, kv_heads, window, softcap) for o in (ops, reference))  # type: ignore[arg-type]
    assert_near(found, expected, 2**-6)
    assert found.is_contiguous()


def test_stacked_layers_give_the_bits_of_single_operations(ops: KernelOps) -> None:
    heads, kv_heads, hidden_size, inner = 6, 2, 200, 99
    shape = LayerShape(heads, kv_heads, HEAD_DIM, HEAD_DIM**-0.5)
    rope = rope_table(64)

    def layer() -> LayerWeights:
        norms = [Norm(torch.rand(hidden_size), 1e-5) for _ in range(2)]
        qkv = ops.pack_linear(random((heads + 2 * kv_heads) * HEAD_DIM, hidden_size) / 10)
        out = ops.pack_linear(random(hidden_size, heads * HEAD_DIM) / 10)
        gate_up = ops.pack_linear(random(2 * inner, hidden_size) / 10, activation="silu_mul")
        down = ops.pack_linear(random(hidden_size, inner) / 10)
        return LayerWeights(norms[0], qkv, out, norms[1], gate_up, down, rope)

    layers = [layer() for _ in range(3)]
    batch = Sequences([40, 9], [40, 9]).batch
    caches = [torch.zeros(6, 3, 2, kv_heads, BLOCK_SIZE, HEAD_DIM, dtype=torch.bfloat16) for _ in range(2)]
    plan = ops.plan_attention(batch, caches[0][:, 0])
    hidden = random(49, hidden_size)
    expected = hidden.clone()
    for index, weights in enumerate(layers):
        kv_layer = caches[0][:, index]
        qkv = ops.linear(expected, weights.qkv, norm=weights.attention_norm).view(len(hidden), -1, HEAD_DIM)
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
        attended = ops.paged_attention(ops.rope_store(q, k, v, kv_layer, plan, rope), kv_layer, plan, shape.scale)
        expected = ops.linear(attended.view(len(hidden), -1), weights.out, residual=expected)
        gated = ops.linear(expected, weights.gate_up, norm=weights.mlp_norm)
        expected = ops.linear(gated, weights.down, residual=expected)
    stack = ops.stack_layers(layers, shape, None)
    assert stack is not None
    found = stack(stack(hidden.clone(), caches[1], plan, range(2)), caches[1], plan, range(2, 3))
    assert torch.equal(found, expected)
    assert torch.equal(caches[0], caches[1])


@pytest.mark.parametrize("n", [1, 19, 4099])
def test_most_likely(ops: KernelOps, n: int) -> None:
    logits = torch.randint(-5, 5, (6, n)).float()
    logits[1] = -torch.inf
    logits[2, -1] = torch.inf
    logits[3, n // 2] = torch.nan
    logits[4, : n // 2] = -torch.inf
    expected = reference.most_likely(logits)
    assert expected.dtype == torch.int64
    assert expected[1:4].tolist() == [-1, -1, -1]
    assert expected[4] == n // 2 + logits[4, n // 2 :].argmax()
    assert torch.equal(ops.most_likely(logits), expected)
