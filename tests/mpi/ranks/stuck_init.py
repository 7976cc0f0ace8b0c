"""Rank 1 comes to MPI_Init 3 s late, or not at all: `stuck_init.py late|never|stay`; `never` is given up soon."""

import os
import sys
import time

from fastserve_hpc.parallel.mpi_init import finalize_mpi, init_mpi
from fastserve_hpc.parallel.signals import block_signals

block_signals()
if os.environ["PMI_RANK"] == "1":
    time.sleep(3 if sys.argv[1] == "late" else 60)
world = init_mpi(warn_after_s=1.0, give_up_after_s=1.0 if sys.argv[1] == "never" else 100.0)
finalize_mpi(world)
