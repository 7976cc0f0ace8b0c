"""How many bytes each rank reads for its part of a model: `loading.py DIRECTORY TP`."""

import sys
from pathlib import Path

import torch

from fastserve_hpc.models.loader import load_model
from fastserve_hpc.models.locate import ModelFiles
from fastserve_hpc.models.reading import Reading
from fastserve_hpc.models.spec import load_spec
from fastserve_hpc.parallel.mpi_comm import MpiTensorComm
from fastserve_hpc.parallel.mpi_init import exchange, finalize_mpi, init_mpi
from fastserve_hpc.parallel.node_file import open_node_file
from fastserve_hpc.parallel.topology import Topology


def bytes_read() -> int:
    """By all calls of this process that read files, from the disk or not."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar:")).split()[1])


directory, tp_size = Path(sys.argv[1]), int(sys.argv[2])
world = init_mpi()
torch.set_num_threads(1)
topology = Topology(world.rank, tp_size, world.size // tp_size)
comm = MpiTensorComm(world, topology, 2**20)
spec = load_spec(directory)
with open_node_file(world, lambda: None) as board:
    before = bytes_read()
    model = load_model(ModelFiles(directory, "wide"), spec, topology, comm, torch.bfloat16, reading=Reading(board))
    counts = [int(count) for count in exchange(world, str(bytes_read() - before).encode())]
comm.close()
if world.rank == 0:
    print("read", *counts)
finalize_mpi(world)
