"""Hidden states of random shapes through all stages, with receivers that compute: `stages.py KIND TP NUM_TENSORS`."""

import random
import sys
import time

import torch

from fastserve_hpc.parallel.comm import TensorComm
from fastserve_hpc.parallel.mpi_comm import MpiTensorComm
from fastserve_hpc.parallel.mpi_init import finalize_mpi, init_mpi
from fastserve_hpc.parallel.topology import Topology
from fastserve_hpc.parallel.torch_comm import TorchTensorComm

KIND, TP_SIZE, NUM_TENSORS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
HIDDEN_SIZE = 576
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def make_tensor(index: int, tp_rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * tp_rank + index)
    num_tokens = random.Random(index).choice((1, 2, 19, 99, 512))
    return torch.randn(num_tokens, HIDDEN_SIZE, generator=generator).to(DTYPES[index % 3])


def compute(comm: TensorComm, index: int) -> None:
    """Layers of a few milliseconds, now on one stage, now on another."""
    for _ in range(random.Random(index * 17 + topology.stage).randrange(6)):
        time.sleep(0.001)
        comm.progress()


world = init_mpi()
torch.set_num_threads(1)
topology = Topology(world.rank, TP_SIZE, world.size // TP_SIZE)
comm: TensorComm
if KIND == "mpi":
    comm = MpiTensorComm(world, topology, max_link_bytes=512 * HIDDEN_SIZE * 4)
else:
    comm = TorchTensorComm(world, topology, torch.device("cpu"))
num_hook_calls = 0


def count() -> None:
    global num_hook_calls
    num_hook_calls += 1
    comm.progress()  # a hook that forgets itself must not recurse for ever


if KIND == "mpi":
    comm.set_progress_hook(count)

started = time.perf_counter()
for index in range(NUM_TENSORS):
    expected = make_tensor(index, topology.tp_rank)
    if topology.is_first_stage:
        hidden = expected.clone()
    else:
        hidden = comm.recv_prev(expected.shape[0], HIDDEN_SIZE, expected.dtype)
        expected += topology.stage
        assert torch.equal(hidden, expected), (index, topology)
    compute(comm, index)
    assert torch.equal(hidden, expected), "overwritten while in use"
    if not topology.is_last_stage:
        base = make_tensor(index, topology.tp_rank)
        base += topology.stage + 1
        comm.send_next(base)
        base.fill_(-1)  # the sender may change it at once
comm.close()
assert KIND == "torch" or num_hook_calls > 0
if topology.reports_results:
    print(f"tensors={NUM_TENSORS} seconds={time.perf_counter() - started:.2f}")
finalize_mpi(world)
