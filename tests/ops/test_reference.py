"""The reference operations against arithmetic in float64, one row at a time. On CUDA too, where there is any."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastserve_hpc import ops
from fastserve_hpc.ops import reference
from fastserve_hpc.ops.interface import Norm

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
SIZES = [1, 2, 19, 99, 576]


@pytest.fixture(params=DEVICES, ids=str)
def device(request: pytest.FixtureRequest) -> Any:
    if request.param.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.manual_seed(0)
    return request.param


@pytest.fixture(params=TOLERANCES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    kind: torch.dtype = request.param
    return kind


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Within the rounding of `found`'s dtype of a float64 result."""
    tolerance = TOLERANCES[found.dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def normed(x: Tensor, norm: Norm) -> Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(dim=-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()


@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(device: torch.device, dtype: torch.dtype, size: int) -> None:
    x = torch.randn(7, size, dtype=dtype, device=device)
    norm = Norm(torch.randn(size, device=device), 1e-3)
    assert_near(reference.rms_norm(x, norm), normed(x, norm))


@pytest.mark.parametrize("size", SIZES)
def test_linear_with_all_that_may_be_fused(device: torch.device, dtype: torch.dtype, size: int) -> None:
    chosen = ops.for_device(device).ops
    x, residual = (torch.randn(5, n, dtype=dtype, device=device) for n in (size, 11))
    weight = torch.randn(22, size, dtype=dtype, device=device) / size**0.5
    bias = torch.randn(22, dtype=dtype, device=device)
    norm = Norm(torch.rand(size, device=device) + 0.5, 1e-5)
    plain = x.double() @ weight.double().T
    assert_near(chosen.linear(x, chosen.pack_linear(weight)), plain)
    assert_near(chosen.linear(x, chosen.pack_linear(weight, bias)), plain + bias.double())
    gate, up = (normed(x, norm) @ weight.double().T + bias.double()).chunk(2, dim=-1)
    expected = residual.double() + torch.nn.functional.silu(gate) * up
    packed = chosen.pack_linear(weight, bias, "silu_mul")
    tolerance = 20 if dtype == torch.bfloat16 else 1  # rounded between the fused steps
    found = chosen.linear(x, packed, norm=norm, residual=residual)
    assert (found.double() - expected).abs().max() <= tolerance * TOLERANCES[dtype] * expected.abs().max()
    assert chosen.linear(x, packed, out_dtype=torch.float32).dtype == torch.float32


def test_embedding(device: torch.device, dtype: torch.dtype) -> None:
    weight = torch.randn(19, 5, dtype=dtype, device=device)
    ids = torch.tensor([18, 0, 3, 3], device=device)
    assert torch.equal(
        ops.for_device(device).ops.embedding(ids, weight), torch.stack([weight[i] for i in ids.tolist()])
    )


def test_embedding_of_a_part_of_the_ids(device: torch.device, dtype: torch.dtype) -> None:
    weight = torch.randn(4, 5, dtype=dtype, device=device)
    ids = torch.tensor([18, 3, 6, 7, 2], device=device)
    zeros = torch.zeros(5, dtype=dtype, device=device)
    expected = torch.stack([zeros, weight[0], weight[3], zeros, zeros])
    assert torch.equal(ops.for_device(device).ops.embedding(ids, weight, first_id=3), expected)


@pytest.mark.parametrize("head_dim", [2, 10, 64])
def test_rope_turns_pairs_in_the_plane(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    x = torch.randn(7, 3, head_dim, dtype=dtype, device=device)
    angles = torch.randn(7, head_dim // 2, device=device) * 100
    plane = torch.complex(*x.double().chunk(2, dim=-1))
    turned = plane * torch.polar(torch.ones_like(angles, dtype=torch.float64), angles.double())[:, None]
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    assert_near(reference.rotate(x, angles.cos(), angles.sin()), expected)
