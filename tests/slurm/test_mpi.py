"""MPI from the wheels over two nodes, started by srun: what works and what must be recognised."""

from __future__ import annotations

import pytest
from slurm_support import Cluster

pytestmark = pytest.mark.slurm

SUM_OF_RANKS = """
import socket
from mpi4py import MPI
world = MPI.COMM_WORLD
print(world.rank, world.size, socket.gethostname(), world.allreduce(world.rank + 1))
"""


LAUNCH = ("srun", "-N2", "--ntasks-per-node=1")


def test_pmi2_makes_one_world_of_two_nodes(cluster: Cluster) -> None:
    assert sorted(cluster.run_python(*LAUNCH, "--mpi=pmi2", code=SUM_OF_RANKS)) == ["0 2 n1 3", "1 2 n2 3"]


def test_without_pmi_every_task_is_a_world_of_its_own(cluster: Cluster) -> None:
    """Silently: what the start-up doctor is for."""
    assert sorted(cluster.run_python(*LAUNCH, "--mpi=none", code=SUM_OF_RANKS)) == ["0 1 n1 1", "0 1 n2 1"]
