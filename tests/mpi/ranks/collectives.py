"""All-reduce and all-gather over the ranks of each stage: `collectives.py KIND:TP...`."""

import random
import sys

import torch
from fastserve_kernels import open_kernels

from fastserve_hpc.parallel.comm import TensorComm
from fastserve_hpc.parallel.mpi_comm import MpiTensorComm
from fastserve_hpc.parallel.mpi_init import exchange, finalize_mpi, init_mpi
from fastserve_hpc.parallel.shared_group import collectives_with
from fastserve_hpc.parallel.topology import Topology
from fastserve_hpc.parallel.torch_comm import TorchTensorComm

SHAPES = ((1, 576), (3, 1), (19, 99), (1, 49152), (509, 576), (7, 5, 3))
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def part(seed: int, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    return (torch.randn(shape, generator=generator) * 10 ** random.Random(seed).uniform(-3, 3)).to(dtype)


def summed_in_rank_order(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].float()
    for other in parts[1:]:
        total = total + other.float()
    return total.to(parts[0].dtype)


def check_all_reduce(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    parts = [part(seed, rank, shape, dtype) for rank in topology.stage_ranks]
    x = parts[topology.tp_rank].clone()
    result = comm.all_reduce(x)
    assert result is x
    if KIND != "torch":
        assert torch.equal(x, summed_in_rank_order(parts)), (seed, shape, dtype)
        one_row = parts[topology.tp_rank][:1].clone()
        assert torch.equal(comm.all_reduce(one_row)[0], x[0]), "a row's bits depend on its neighbours"
    else:
        tolerance = 0.05 if dtype is not torch.float32 else 1e-4
        torch.testing.assert_close(
            x, summed_in_rank_order(parts), rtol=tolerance, atol=tolerance * float(x.abs().max())
        )
    return x


def check_all_gather(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    parts = [part(seed, rank, shape, dtype) for rank in topology.stage_ranks]
    x = parts[topology.tp_rank].clone()
    assert torch.equal(comm.all_gather(x), torch.cat(parts, dim=-1))
    joined = comm.gather(x)
    assert torch.equal(joined, torch.cat(parts, dim=-1) if topology.tp_rank == 0 else x)
    assert torch.equal(x, parts[topology.tp_rank])


def digest(x: torch.Tensor) -> bytes:
    return bytes(x.contiguous().view(torch.uint8).flatten()[:4000].tolist())


def check_views() -> None:
    strided = torch.arange(24, dtype=torch.float32).view(4, 6).t()
    assert torch.equal(comm.all_reduce(strided.clone()), strided * topology.tp_size)
    view = torch.ones(4, 6)[:, 1:3]
    comm.all_reduce(view)
    assert (view == topology.tp_size).all()
    assert comm.all_reduce(torch.empty(0, 5)).shape == (0, 5)


def check_kind() -> None:
    for seed, shape in enumerate(SHAPES):
        for dtype in DTYPES:
            x = check_all_reduce(seed, shape, dtype)
            others = exchange(world, digest(x))
            assert all(others[rank] == digest(x) for rank in topology.stage_ranks), "bits differ between ranks"
            check_all_gather(seed, shape, dtype)
    check_views()


world = init_mpi()
torch.set_num_threads(1)
for KIND, tp_size in (case.split(":") for case in sys.argv[1:]):
    topology = Topology(world.rank, int(tp_size), world.size // int(tp_size))
    comm: TensorComm
    if KIND == "mpi":
        comm = MpiTensorComm(world, topology, max_link_bytes=64)
    elif KIND == "shared":
        comm = MpiTensorComm(world, topology, max_link_bytes=64, make_collectives=collectives_with(open_kernels()))
        assert (comm.shared is None) == (topology.tp_size == 1)
    else:
        comm = TorchTensorComm(world, topology, torch.device("cpu"))
    check_kind()
    comm.close()
    if world.rank == 0:
        print(f"{KIND}:{tp_size} equal")
finalize_mpi(world)
