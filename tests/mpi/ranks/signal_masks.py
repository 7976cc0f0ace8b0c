"""After MPI_Init signals are blocked in every thread: one that took them would be ended by the first."""

import os
import signal
from pathlib import Path

from fastserve_hpc.parallel.mpi_init import finalize_mpi, init_mpi
from fastserve_hpc.parallel.signals import block_signals

block_signals()
world = init_mpi()
for status in Path("/proc/self/task").glob("*/status"):
    [mask] = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("SigBlk:")]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        assert int(mask, 16) >> (number - 1) & 1, (number, status)
os.write(1, b"blocked in all threads\n")
finalize_mpi(world)
