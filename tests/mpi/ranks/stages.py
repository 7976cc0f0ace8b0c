"""Hidden states of random shapes through all stages, whose ranks compute too: `stages.py NUM_TENSORS KIND:TP...`."""

import random
import sys
import time

import torch

from fastserve_hpc.parallel.comm import TensorComm
from fastserve_hpc.parallel.mpi_comm import MpiTensorComm
from fastserve_hpc.parallel.mpi_init import finalize_mpi, init_mpi
from fastserve_hpc.parallel.topology import Topology
from fastserve_hpc.parallel.torch_comm import TorchTensorComm

NUM_TENSORS = int(sys.argv[1])
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


def open_comm(kind: str) -> TensorComm:
    if kind == "mpi":
        return MpiTensorComm(world, topology, max_link_bytes=512 * HIDDEN_SIZE * 4)
    return TorchTensorComm(world, topology, torch.device("cpu"))


def pass_one(index: int) -> None:
    expected = make_tensor(index, topology.tp_rank) + topology.stage
    hidden = expected.clone()
    if not topology.is_first_stage:
        hidden = comm.recv_prev(expected.shape[0], HIDDEN_SIZE, expected.dtype)
        assert torch.equal(hidden, expected), (index, topology)
    compute(comm, index)
    assert torch.equal(hidden, expected), "overwritten while in use"
    if not topology.is_last_stage:
        sent = make_tensor(index, topology.tp_rank) + (topology.stage + 1)
        comm.send_next(sent)
        sent.fill_(-1)  # the sender may change it at once


def recurse() -> None:
    global num_hook_calls
    num_hook_calls += 1
    comm.progress()  # a hook that forgets itself must not recurse for ever


world = init_mpi()
torch.set_num_threads(1)
num_hook_calls = 0
for kind, tp_size in (case.split(":") for case in sys.argv[2:]):
    topology = Topology(world.rank, int(tp_size), world.size // int(tp_size))
    comm = open_comm(kind)
    if kind == "mpi":
        comm.set_progress_hook(recurse)
    for index in range(NUM_TENSORS):
        pass_one(index)
    comm.close()
    if topology.reports_results:
        print(f"{kind}:{tp_size} tensors={NUM_TENSORS}")
assert num_hook_calls > 0
finalize_mpi(world)
