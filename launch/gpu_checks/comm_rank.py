"""One rank of the check of `TorchTensorComm`: `python -m launch.gpu_checks.comm_rank cuda|cpu`, mpiexec before it."""

from __future__ import annotations

import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor

from fastserve_hpc.parallel.mpi_init import finalize_mpi, init_mpi
from fastserve_hpc.parallel.topology import Topology
from fastserve_hpc.parallel.torch_comm import TorchTensorComm

SHAPES = ((1, 576), (19, 99), (512, 576))
DTYPES = (torch.float32, torch.bfloat16)


def part(rank: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator).to(device, dtype)


def check_stage(comm: TorchTensorComm, topology: Topology, device: torch.device) -> None:
    """Sums and joins over all ranks as one stage."""
    for shape in SHAPES:
        for dtype in DTYPES:
            parts = [part(rank, shape, dtype, device) for rank in topology.stage_ranks]
            total = torch.stack([x.float() for x in parts]).sum(dim=0)
            tolerance = 1e-4 if dtype is torch.float32 else 0.05
            found = comm.all_reduce(parts[topology.tp_rank].clone()).float()
            torch.testing.assert_close(found, total, atol=tolerance, rtol=tolerance)
            assert torch.equal(comm.all_gather(parts[topology.tp_rank]), torch.cat(parts, dim=-1))


def check_links(comm: TorchTensorComm, topology: Topology, device: torch.device) -> None:
    """Hidden states through all ranks as stages, two under way."""
    for number in range(8):
        expected = part(number, (7, 96), torch.bfloat16, device)
        x = expected if topology.is_first_stage else comm.recv_prev(7, 96, torch.bfloat16)
        assert torch.equal(x, expected), f"tensor {number} came with other bits"
        if not topology.is_last_stage:
            comm.send_next(x)


def check_backend(device: torch.device) -> float:
    """A sum of 4 KB over the group, also where it is one rank and `TorchTensorComm` has nothing to do; microseconds."""
    x, times = torch.ones(1024, device=device), []
    for _ in range(50):
        began = time.perf_counter()
        dist.all_reduce(x)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    assert torch.isfinite(x).all()
    return statistics.median(times) * 1e6


def main() -> None:
    world = init_mpi()
    device = torch.device(sys.argv[1], world.rank) if sys.argv[1] == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    as_stage, as_pipeline = Topology(world.rank, world.size, 1), Topology(world.rank, 1, world.size)
    comm = TorchTensorComm(world, as_stage, device)
    check_stage(comm, as_stage, device)
    median_us, backend = check_backend(device), dist.get_backend()
    comm.close()
    comm = TorchTensorComm(world, as_pipeline, device)
    check_links(comm, as_pipeline, device)
    comm.close()
    if world.rank == 0:
        print(f"{world.size} rank{'s' * (world.size > 1)} over {backend}, all-reduce of 4 KB in {median_us:.0f} us")
    finalize_mpi(world)


if __name__ == "__main__":
    main()
