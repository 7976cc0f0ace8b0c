from __future__ import annotations

import pytest
import torch
from fastserve_kernels import reference
from fastserve_kernels.abi import Activation
from fastserve_kernels.kernels import Kernels
from torch import Tensor

SIZES = [1, 19, 99, 576, 989]


def bf16(*shape: int, seed: int = 0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).bfloat16()


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("rows", [1, 19, 99])
def test_rms_norm(kernels: Kernels, rows: int, n: int) -> None:
    x, weight = bf16(rows, n), torch.randn(n)
    y = kernels.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(y.float(), reference.rms_norm(x, weight, 1e-5).float(), rtol=0.01, atol=1e-6)
    assert torch.equal(kernels.rms_norm(x, weight, 1e-5, out=x), y)


@pytest.mark.parametrize("n", SIZES)
def test_rms_norm_adds_the_residual_first(kernels: Kernels, n: int) -> None:
    x, residual, weight = bf16(19, n), bf16(19, n, seed=1), torch.randn(n)
    total = residual + x
    y = kernels.rms_norm(x, weight, 1e-5, residual=residual)
    assert torch.equal(residual, total)
    assert torch.equal(y, kernels.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("activation", [Activation.SILU_MUL, Activation.GELU_TANH_MUL])
def test_gate_mul(kernels: Kernels, activation: Activation, n: int) -> None:
    both = bf16(19, 2 * n)
    gate, up = both[:, :n], both[:, n:]
    y = kernels.gate_mul(gate, up, activation)
    expected = reference.activate(gate.float(), activation, up.float())
    torch.testing.assert_close(y.float(), expected, rtol=0.01, atol=1e-5)


@pytest.mark.parametrize("activation", [Activation.SILU_MUL, Activation.GELU_TANH_MUL])
def test_gate_mul_at_the_ends_of_the_range(kernels: Kernels, activation: Activation) -> None:
    gate = torch.tensor([[0.0, -0.0, 60.0, -60.0, 1e4, -1e4, 3e38, -3e38, float("nan")]]).bfloat16()
    y = kernels.gate_mul(gate, torch.ones_like(gate), activation).float()
    expected = reference.activate(gate.float(), activation, torch.ones_like(gate).float())
    torch.testing.assert_close(y, expected, rtol=0.01, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("n", SIZES)
def test_embedding(kernels: Kernels, n: int) -> None:
    table, ids = bf16(99, n), torch.tensor([0, 98, 19, 19, 50])
    assert torch.equal(kernels.embedding(ids, table), table[ids])
    scaled = kernels.embedding(ids, table, scale=24.0)
    assert torch.equal(scaled, (table[ids].float() * 24.0).bfloat16())


@pytest.mark.parametrize("n", SIZES)
def test_embedding_from_a_packed_head(kernels: Kernels, n: int) -> None:
    table, ids = bf16(99, n), torch.tensor([0, 98, 19, 32, 31, 200])
    packed = kernels.pack_linear(table)
    assert torch.equal(kernels.embedding(ids, packed), kernels.embedding(ids, table))
    assert torch.equal(
        kernels.embedding(ids, packed, first_id=1, scale=24.0), kernels.embedding(ids, table, first_id=1, scale=24.0)
    )


def test_embedding_of_a_part_of_the_vocabulary(kernels: Kernels) -> None:
    table, ids = bf16(50, 64), torch.tensor([0, 99, 100, 149, 150, 2**62, -1])
    y = kernels.embedding(ids, table, first_id=100)
    assert torch.equal(y[2], table[0])
    assert torch.equal(y[3], table[49])
    assert (y[[0, 1, 4, 5, 6]] == 0).all()


@pytest.mark.parametrize("n", [1, 15, 16, 19, 49152])
def test_argmax(kernels: Kernels, n: int) -> None:
    x = torch.randn(19, n)
    assert torch.equal(kernels.argmax(x), x.argmax(-1))
    x[:] = 1.0
    assert (kernels.argmax(x) == 0).all()


@pytest.mark.parametrize("n", [5, 100])
def test_argmax_takes_the_first_of_equals_and_no_row_without_numbers(kernels: Kernels, n: int) -> None:
    x = torch.full((6, n), -5.0)
    x[0, [2, n - 1]] = 3.0
    x[1, 3], x[1, n - 1] = float("nan"), -4.0
    x[2, :] = float("-inf")
    x[3, :] = float("nan")
    x[4, 1] = float("inf")
    x[5, : n - 1] = float("-inf")
    assert kernels.argmax(x).tolist() == [2, -1, -1, -1, -1, n - 1]


def test_copy_blocks(kernels: Kernels) -> None:
    source, target = bf16(10, 2, 3, 16, 32), bf16(20, 2, 3, 16, 32, seed=1)
    before = target.clone()
    kernels.copy_blocks(source, target, torch.tensor([[3, 19], [0, 4], [9, 0]]))
    before[[19, 4, 0]] = source[[3, 0, 9]]
    assert torch.equal(target, before)
    kernels.copy_blocks(source, target, torch.zeros(0, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="out of range"):
        kernels.copy_blocks(source, target, torch.tensor([[3, 20]]))


def test_instruction_sets_give_the_same_bits(every_isa: dict[str, Kernels]) -> None:
    x, residual, weight = bf16(19, 989), bf16(19, 989, seed=1), torch.randn(989)
    results = [
        (
            kernels.rms_norm(x, weight, 1e-6, residual=residual.clone()),
            kernels.gate_mul(x, residual),
            kernels.gate_mul(x, residual, Activation.GELU_TANH_MUL),
        )
        for kernels in every_isa.values()
    ]
    for other in results[1:]:
        for ours, theirs in zip(results[0], other, strict=True):
            assert torch.equal(ours, theirs)
