"""Every rank waits for plans as an idle server does, and says what it cost: `idle.py SECONDS`."""

import os
import sys
import time

from fastserve_hpc.core.plan import IterationPlan
from fastserve_hpc.parallel.idle import Backoff
from fastserve_hpc.parallel.mpi_control import MpiControl, MpiWorkerControl
from fastserve_hpc.parallel.mpi_init import finalize_mpi, init_mpi
from fastserve_hpc.parallel.mpi_watchdog import start_watchdog
from fastserve_hpc.parallel.topology import Topology


def cpu_s() -> float:
    times = os.times()
    return times.user + times.system


def idle(poll, seconds: float) -> float:
    """The CPU seconds of `seconds` of waiting in vain."""
    backoff, before, end = Backoff(), cpu_s(), time.monotonic() + seconds
    while time.monotonic() < end:
        assert not poll()
        backoff.pause()
    return cpu_s() - before


world = init_mpi()
watchdog = start_watchdog(world, Topology(world.rank, 1, world.size), heartbeat_s=10)
if world.rank == 0:
    control = MpiControl(world)
    used = idle(control.collect, float(sys.argv[1]))
    control.publish(IterationPlan(1, shutdown=True))
else:
    control = MpiWorkerControl(world)
    used = idle(control.next_plan, float(sys.argv[1]) - 0.2)
    while control.next_plan() is None:
        time.sleep(0.001)
sys.stdout.write(f"cpu_s={used:.3f}\n")
sys.stdout.flush()
control.close()
finalize_mpi(world, watchdog.check)
watchdog.close()
