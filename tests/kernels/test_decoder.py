from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fastserve_kernels import open_kernels
from fastserve_kernels.abi import Activation
from fastserve_kernels.decoder import DecoderLayer, DecoderShape, DecoderStack
from fastserve_kernels.kernels import Kernels
from fastserve_kernels.packing import PackedLinear
from fastserve_kernels.shared import SharedGroup
from torch import Tensor

LLAMA = DecoderShape(num_heads=6, num_kv_heads=2, head_dim=32, norm_eps=1e-5, scale=32**-0.5)
GEMMA = replace(LLAMA, softcap=20.0, activation=Activation.GELU_TANH_MUL)
HIDDEN, INTERMEDIATE, NUM_LAYERS = 200, 99, 3


def random(*shape: int, scale: float = 0.1) -> Tensor:
    return (torch.randn(*shape) * scale).bfloat16()


def make_layer(kernels: Kernels, shape: DecoderShape, extras: bool, window: int) -> DecoderLayer:
    def weight(n: int, k: int) -> PackedLinear:
        return kernels.pack_linear(random(n, k), torch.randn(n) if extras else None)

    attention = shape.num_heads * shape.head_dim
    angles = torch.rand(256, shape.head_dim // 2) * 6
    gate, up = random(INTERMEDIATE, HIDDEN), random(INTERMEDIATE, HIDDEN)
    return DecoderLayer(
        input_norm=torch.rand(HIDDEN),
        qkv=weight(attention + 2 * shape.num_kv_heads * shape.head_dim, HIDDEN),
        out=weight(HIDDEN, attention),
        mlp_norm=torch.rand(HIDDEN),
        gate_up=kernels.pack_linear(gate, up=up),
        down=weight(HIDDEN, INTERMEDIATE),
        cos=angles.cos(),
        sin=angles.sin(),
        q_norm=torch.rand(shape.head_dim) if extras else None,
        k_norm=torch.rand(shape.head_dim) if extras else None,
        attention_out_norm=torch.rand(HIDDEN) if extras else None,
        mlp_out_norm=torch.rand(HIDDEN) if extras else None,
        window=window,
    )


def make_stack(kernels: Kernels, shape: DecoderShape, extras: bool) -> DecoderStack:
    torch.manual_seed(3)
    return DecoderStack([make_layer(kernels, shape, extras, 24 * (i % 2)) for i in range(NUM_LAYERS)], shape)


def make_cache(shape: DecoderShape) -> Tensor:
    return torch.full((8, NUM_LAYERS, 2, shape.num_kv_heads, 16, shape.head_dim), float("nan")).bfloat16()


class Step:
    """The tensors of one call for one sequence in blocks 5, 2, 7, ..., positions start .. end - 1."""

    def __init__(self, start: int, end: int) -> None:
        blocks = torch.tensor([5, 2, 7, 1, 0])
        self.positions = torch.arange(start, end)
        self.slots = blocks[self.positions // 16] * 16 + self.positions % 16
        self.block_tables = blocks[None].int()
        self.query_start = torch.tensor([0, end - start], dtype=torch.int32)
        self.seq_lens = torch.tensor([end], dtype=torch.int32)

    def run(self, kernels: Kernels, stack: DecoderStack, hidden: Tensor, cache: Tensor) -> Tensor:
        return kernels.decoder_layers(
            stack, hidden, cache, self.positions, self.slots, self.block_tables, self.query_start, self.seq_lens
        )


def one_by_one(kernels: Kernels, stack: DecoderStack, hidden: Tensor, cache: Tensor, step: Step) -> Tensor:
    """The layers as calls of single operations."""
    shape = stack.shape
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    for i, layer in enumerate(stack.layers):

        def add(x: Tensor, weight: PackedLinear, norm: Tensor | None, hidden: Tensor = hidden) -> None:
            if norm is None:
                kernels.linear(x, weight, residual=hidden, out=hidden)
                return
            y = kernels.linear(x, weight, out_dtype=torch.float32)
            scale = torch.rsqrt(y.square().mean(-1, keepdim=True) + shape.norm_eps)
            hidden.copy_((hidden.float() + y * scale * norm).bfloat16())

        qkv = kernels.linear(hidden, layer.qkv, norm_weight=layer.input_norm, eps=shape.norm_eps)
        q, k, v = torch.split(qkv, [q_size, kv_size, kv_size], dim=1)
        kernels.rope_store(
            q, k, v, cache[:, i], step.positions, step.slots,
            cos=layer.cos, sin=layer.sin, q_norm=layer.q_norm, k_norm=layer.k_norm, norm_eps=shape.norm_eps,
        )  # fmt: skip
        attended = kernels.paged_attention(
            q, cache[:, i], step.block_tables, step.query_start, step.seq_lens,
            scale=shape.scale, window=layer.window, softcap=shape.softcap, out=torch.empty(len(q), q_size).bfloat16(),
        )  # fmt: skip
        add(attended, layer.out, layer.attention_out_norm)
        gated = kernels.linear(
            hidden, layer.gate_up, norm_weight=layer.mlp_norm, eps=shape.norm_eps, activation=shape.activation
        )
        add(gated, layer.down, layer.mlp_out_norm)
    return hidden


@pytest.mark.parametrize("rows", [1, 19, 70])
def test_equals_one_operation_after_the_other(kernels: Kernels, rows: int) -> None:
    stack = make_stack(kernels, LLAMA, extras=False)
    hidden, step = random(rows, HIDDEN, scale=1.0), Step(0, rows)
    expected = one_by_one(kernels, stack, hidden.clone(), make_cache(LLAMA), step)
    assert torch.equal(step.run(kernels, stack, hidden, make_cache(LLAMA)), expected)


@pytest.mark.parametrize("rows", [1, 19])
def test_norms_behind_attention_and_mlp(kernels: Kernels, rows: int) -> None:
    stack = make_stack(kernels, GEMMA, extras=True)
    hidden, step = random(rows, HIDDEN, scale=1.0), Step(0, rows)
    expected = one_by_one(kernels, stack, hidden.clone(), make_cache(GEMMA), step)
    result = step.run(kernels, stack, hidden, make_cache(GEMMA))
    torch.testing.assert_close(result.float(), expected.float(), rtol=0.02, atol=0.02)  # torch's norm differs in bits


@pytest.mark.parametrize("extras", [False, True])
def test_chunks_change_no_bit(kernels: Kernels, extras: bool) -> None:
    shape = GEMMA if extras else LLAMA
    stack = make_stack(kernels, shape, extras)
    hidden = random(70, HIDDEN, scale=1.0)
    whole = Step(0, 70).run(kernels, stack, hidden.clone(), make_cache(shape))
    cache = make_cache(shape)
    bounds = [0, 7, 8, 9, 41, 57, 58, 70]
    pieces = [
        Step(start, end).run(kernels, stack, hidden[start:end].clone(), cache)
        for start, end in itertools.pairwise(bounds)
    ]
    assert torch.equal(torch.cat(pieces), whole)


def test_layers_may_be_run_in_parts(kernels: Kernels) -> None:
    stack, step = make_stack(kernels, LLAMA, extras=False), Step(0, 19)
    hidden = random(19, HIDDEN, scale=1.0)
    whole = step.run(kernels, stack, hidden.clone(), make_cache(LLAMA))
    cache = make_cache(LLAMA)
    batch = (step.positions, step.slots, step.block_tables, step.query_start, step.seq_lens)
    for first in range(NUM_LAYERS):
        kernels.decoder_layers(stack, hidden, cache, *batch, first=first, last=first + 1)
    assert torch.equal(hidden, whole)


def test_layers_that_do_not_fit_are_refused(kernels: Kernels) -> None:
    layer = make_layer(kernels, LLAMA, extras=False, window=0)
    with pytest.raises(ValueError, match="qkv has other heads"):
        DecoderStack([layer], replace(LLAMA, num_heads=4))
    with pytest.raises(ValueError, match="gated"):
        DecoderStack([layer], replace(LLAMA, activation=Activation.RELU))
    stack, hidden = DecoderStack([layer], LLAMA), random(1, HIDDEN)
    with pytest.raises(ValueError, match="other heads"):
        Step(0, 1).run(kernels, stack, hidden, make_cache(replace(LLAMA, head_dim=64)))
    with pytest.raises(ValueError, match="hidden_size"):
        Step(0, 1).run(kernels, stack, random(1, HIDDEN + 1), make_cache(LLAMA))


WIDE = 128


def one_share(rank: int, num_ranks: int, path: Path, slot_bytes: int, rows: int) -> Tensor:
    """The hidden state after one layer of which this rank holds one share."""
    kernels = open_kernels(num_threads=2)
    shape = DecoderShape(4 // num_ranks, 2 // num_ranks, head_dim=32, norm_eps=1e-5, scale=0.2)
    torch.manual_seed(0)
    q, k, v, out = random(128, WIDE), random(64, WIDE), random(64, WIDE), random(WIDE, 128)
    gate, up, down = random(96, WIDE), random(96, WIDE), random(WIDE, 96)

    def share(weight: Tensor, dim: int) -> Tensor:
        return weight.chunk(num_ranks, dim)[rank]

    layer = DecoderLayer(
        input_norm=torch.rand(WIDE),
        qkv=kernels.pack_linear(torch.cat([share(w, 0) for w in (q, k, v)])),
        out=kernels.pack_linear(share(out, 1)),
        mlp_norm=torch.rand(WIDE),
        gate_up=kernels.pack_linear(share(gate, 0), up=share(up, 0)),
        down=kernels.pack_linear(share(down, 1)),
        mlp_out_norm=torch.rand(WIDE),
    )
    group = SharedGroup(path, rank, num_ranks, slot_bytes) if num_ranks > 1 else None
    cache = torch.zeros(8, 1, 2, shape.num_kv_heads, 16, 32).bfloat16()
    stack = DecoderStack([layer], shape, group)
    return Step(0, rows).run(kernels, stack, random(rows, WIDE, scale=1.0), cache)


@pytest.mark.parametrize(
    ("rows", "slot_bytes"),
    [(1, 1 << 16), (33, 1 << 16), (33, 1 << 12), (70, 1 << 16)],
    ids=["one row", "summed by each rank", "in pieces", "summed by parts"],
)
def test_two_ranks_share_the_layers(run_ranks: Callable[..., list[Any]], rows: int, slot_bytes: int) -> None:
    def as_list(*args: Any) -> list[list[float]]:
        values: list[list[float]] = one_share(*args, rows).float().tolist()
        return values

    first, second = (torch.tensor(values) for values in run_ranks(as_list, 2, slot_bytes))
    (alone,) = (torch.tensor(values) for values in run_ranks(as_list, 1, slot_bytes))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, alone, rtol=0.02, atol=0.02)
