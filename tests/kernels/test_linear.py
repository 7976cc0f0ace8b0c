from __future__ import annotations

import pytest
import torch
from fastserve_kernels import open_kernels, reference
from fastserve_kernels.abi import Activation
from fastserve_kernels.kernels import Kernels
from torch import Tensor

SHAPES = [(1, 1), (19, 99), (99, 19), (96, 64), (577, 576), (64, 1536)]  # n, k
GATED = [Activation.SILU_MUL, Activation.GELU_TANH_MUL]


def bf16(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).bfloat16()


def assert_close_bf16(actual: Tensor, expected: Tensor, k: int) -> None:
    """Within one rounding to bf16 and what the order of k sums in float32 can change."""
    torch.testing.assert_close(actual.float(), expected, rtol=2**-8, atol=k**0.5 * 1e-5)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_packing_is_the_documented_layout(kernels: Kernels, n: int, k: int) -> None:
    weight, up = bf16(n, k), bf16(n, k, seed=1)
    assert torch.equal(kernels.pack_linear(weight).data, reference.pack(weight))
    assert torch.equal(kernels.pack_linear(weight, up=up).data, reference.pack(weight, up))


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("step", [1, 16, 23, 64])
def test_packing_in_pieces_in_any_order_is_the_same(kernels: Kernels, n: int, k: int, step: int) -> None:
    weight, up, wide = bf16(n, k), bf16(n, k, seed=1), bf16(n, k + 5, seed=2)
    plain = kernels.new_linear(n, k, None, is_gated=False)
    gated = kernels.new_linear(n, k, None, is_gated=True)
    strided = kernels.new_linear(n, k, None, is_gated=False)
    for first in reversed(range(0, n, step)):
        kernels.pack_rows(plain, first, weight[first : first + step])
        kernels.pack_rows(gated, first, up[first : first + step], is_up=True)
        kernels.pack_rows(gated, first, weight[first : first + step])
        kernels.pack_rows(strided, first, wide[first : first + step, 3 : 3 + k])
    assert torch.equal(plain.data, reference.pack(weight))
    assert torch.equal(gated.data, reference.pack(weight, up))
    assert torch.equal(strided.data, reference.pack(wide[:, 3 : 3 + k]))


def test_pieces_that_do_not_fit_are_refused(kernels: Kernels) -> None:
    packed = kernels.new_linear(32, 64, None, is_gated=False)
    for first, rows, is_up in [(1, bf16(32, 64), False), (-1, bf16(1, 64), False), (0, bf16(1, 64), True)]:
        with pytest.raises(ValueError, match=r"so many outputs|second half"):
            kernels.pack_rows(packed, first, rows, is_up=is_up)
    with pytest.raises(ValueError, match="num_inputs"):
        kernels.pack_rows(packed, 0, bf16(1, 63))


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("rows", [1, 19, 99])
def test_equals_the_reference(kernels: Kernels, n: int, k: int, rows: int) -> None:
    x, weight, bias = bf16(rows, k), bf16(n, k, seed=1), torch.randn(n)
    packed = kernels.pack_linear(weight, bias)
    expected = reference.linear(x, weight, bias)
    y = kernels.linear(x, packed, out_dtype=torch.float32)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=k**0.5 * 1e-5)
    assert torch.equal(kernels.linear(x, packed), y.bfloat16())


@pytest.mark.parametrize("rows", [1, 19])
def test_residual_may_be_the_output(kernels: Kernels, rows: int) -> None:
    x, weight, residual = bf16(rows, 99), bf16(77, 99, seed=1), bf16(rows, 77, seed=2)
    expected = reference.linear(x, weight) + residual.float()
    kernels.linear(x, kernels.pack_linear(weight), residual=residual, out=residual)
    assert_close_bf16(residual, expected, 99)


@pytest.mark.parametrize("activation", GATED)
@pytest.mark.parametrize(("n", "k", "rows"), [(99, 64, 1), (19, 99, 19), (1536, 576, 3)])
def test_gated_activation(kernels: Kernels, activation: Activation, n: int, k: int, rows: int) -> None:
    x, gate, up = bf16(rows, k), bf16(n, k, seed=1, scale=0.2), bf16(n, k, seed=2, scale=0.2)
    gate_bias, up_bias = torch.randn(n), torch.randn(n)
    packed = kernels.pack_linear(gate, gate_bias, up=up, up_bias=up_bias)
    y = kernels.linear(x, packed, activation=activation)
    expected = reference.activate(reference.linear(x, gate, gate_bias), activation, reference.linear(x, up, up_bias))
    assert_close_bf16(y, expected, k)


def test_relu(kernels: Kernels) -> None:
    x, weight = bf16(19, 99), bf16(77, 99, seed=1)
    y = kernels.linear(x, kernels.pack_linear(weight), activation=Activation.RELU)
    assert_close_bf16(y, reference.linear(x, weight).relu(), 99)


@pytest.mark.parametrize("k", [19, 576])
def test_norm_on_the_input(kernels: Kernels, k: int) -> None:
    x, weight, norm_weight = bf16(19, k, scale=3.0), bf16(99, k, seed=1), torch.rand(k)
    y = kernels.linear(x, kernels.pack_linear(weight), norm_weight=norm_weight, eps=1e-5, out_dtype=torch.float32)
    expected = reference.linear(reference.rms_norm(x, norm_weight, 1e-5), weight)
    torch.testing.assert_close(y, expected, rtol=0.01, atol=0.01 * k**0.5)  # a norm may round to the neighbour


@pytest.mark.parametrize(("n", "k"), [(99, 19), (960, 576), (576, 1536), (131, 4096)])
def test_a_row_does_not_depend_on_the_others(kernels: Kernels, n: int, k: int) -> None:
    x, norm_weight = bf16(700, k), torch.rand(k)
    packed = kernels.pack_linear(bf16(n, k, seed=1), torch.randn(n))

    def run(rows: Tensor) -> Tensor:
        return kernels.linear(rows, packed, norm_weight=norm_weight, eps=1e-5, out_dtype=torch.float32)

    together = run(x)
    for start, count in [
        (0, 1),
        (699, 1),
        (350, 2),
        (13, 3),
        (5, 6),
        (17, 7),
        (1, 16),
        (3, 17),
        (40, 31),
        (8, 33),
        (96, 577),
    ]:
        assert torch.equal(run(x[start : start + count]), together[start : start + count]), (start, count)
    one_by_one = torch.cat([run(x[i : i + 1]) for i in range(0, 700, 3)])
    assert torch.equal(one_by_one, together[::3])


@pytest.mark.parametrize("threads", [1, 3, 7])
def test_the_number_of_threads_changes_no_bit(kernels: Kernels, threads: int) -> None:
    x, packed = bf16(99, 576), kernels.pack_linear(bf16(960, 576, seed=1))
    others = open_kernels(kernels.isa, num_threads=threads)
    assert torch.equal(others.linear(x, packed), kernels.linear(x, packed))


def test_instruction_sets_with_one_order_give_the_same_bits(every_isa: dict[str, Kernels]) -> None:
    x, gate, up = bf16(37, 200), bf16(99, 200, seed=1), bf16(99, 200, seed=2)
    norm_weight = torch.rand(200)
    results: dict[str, Tensor] = {}
    for kernels in every_isa.values():
        y = kernels.linear(
            x, kernels.pack_linear(gate, up=up), norm_weight=norm_weight, eps=1e-6, activation=Activation.SILU_MUL
        )
        assert torch.equal(results.setdefault(kernels.dot_order, y), y), kernels.isa


def test_strided_rows(kernels: Kernels) -> None:
    wide, weight = bf16(19, 400), bf16(33, 64, seed=1)
    out = torch.full((19, 100), -7.0, dtype=torch.bfloat16)
    packed = kernels.pack_linear(weight)
    kernels.linear(wide[:, 100:164], packed, out=out[:, 10:43])
    assert torch.equal(out[:, 10:43], kernels.linear(wide[:, 100:164].contiguous(), packed))
    assert (out[:, :10] == -7).all()
    assert (out[:, 43:] == -7).all()


def test_no_rows(kernels: Kernels) -> None:
    assert kernels.linear(bf16(0, 64), kernels.pack_linear(bf16(32, 64))).shape == (0, 32)


def test_not_a_number_stays_in_its_row(kernels: Kernels) -> None:
    x = bf16(5, 64)
    x[2, 3] = float("nan")
    y = kernels.linear(x, kernels.pack_linear(bf16(32, 64, seed=1)))
    assert y[2].isnan().all()
    assert y[[0, 1, 3, 4]].isfinite().all()


def test_wrong_arguments_are_refused(kernels: Kernels) -> None:
    packed = kernels.pack_linear(bf16(32, 64))
    with pytest.raises(ValueError, match="num_inputs"):
        kernels.linear(bf16(3, 65), packed)
    with pytest.raises(ValueError, match="num_inputs"):
        kernels.linear(bf16(3, 64).float(), packed)
    with pytest.raises(ValueError, match="gated"):
        kernels.linear(bf16(3, 64), packed, activation=Activation.SILU_MUL)
    with pytest.raises(ValueError, match="weights must be bf16"):
        kernels.pack_linear(torch.zeros(4, 4))
