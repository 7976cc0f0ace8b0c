"""Ranks that wait for each other while one fails: `faults.py WHERE VICTIM HEARTBEAT_S`.

The victim writes its pid and then waits to be killed or stopped, or raises; the others wait for it in the place
WHERE: "plan", "hidden", "sum" or "end".
"""

import os
import sys
import time

import torch

from fastserve_hpc.parallel.comm import TensorComm
from fastserve_hpc.parallel.idle import Backoff
from fastserve_hpc.parallel.mpi_comm import MpiTensorComm
from fastserve_hpc.parallel.mpi_control import MpiControl, MpiWorkerControl
from fastserve_hpc.parallel.mpi_init import finalize_mpi, init_mpi
from fastserve_hpc.parallel.mpi_watchdog import start_watchdog
from fastserve_hpc.parallel.topology import Topology

WHERE, VICTIM, HEARTBEAT_S = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])


def fail() -> None:
    os.write(1, f"victim {os.getpid()}\n".encode())
    if WHERE == "raise":
        raise ZeroDivisionError("the test asked for it")
    time.sleep(60)


def wait_in_vain(comm: TensorComm, control: "MpiControl | MpiWorkerControl") -> None:
    if WHERE == "hidden":
        comm.recv_prev(8, 8, torch.float32)
    if WHERE == "sum":
        comm.all_reduce(torch.ones(8))
    backoff = Backoff()
    while WHERE in ("plan", "raise"):
        assert not (control.collect() if isinstance(control, MpiControl) else control.next_plan())
        backoff.pause()


world = init_mpi()
tp_size = world.size if WHERE == "sum" else 1
topology = Topology(world.rank, tp_size, world.size // tp_size)
watchdog = start_watchdog(world, topology, HEARTBEAT_S)
try:
    comm = MpiTensorComm(world, topology, 1 << 20, watchdog.check)
    control = MpiControl(world) if world.rank == 0 else MpiWorkerControl(world)
    if world.rank == VICTIM:
        fail()
    wait_in_vain(comm, control)
    finalize_mpi(world, watchdog.check)
except BaseException as error:
    watchdog.abort(error)
