"""The ranks wait for plans as an idle server does, then get one: `idle.py SECONDS`.

Every rank writes the CPU seconds that waiting cost; rank 0 also how long the first answer then took.
"""

import sys
import time

from fastserve_hpc.core.plan import IterationPlan, RankReport
from fastserve_hpc.parallel.idle import Backoff
from fastserve_hpc.parallel.mpi_control import MpiControl, MpiWorkerControl
from fastserve_hpc.parallel.mpi_init import finalize_mpi, init_mpi
from fastserve_hpc.parallel.mpi_watchdog import start_watchdog
from fastserve_hpc.parallel.topology import Topology
from fastserve_hpc.worker import loop


class IdleWorker:
    """Computes nothing; notes the CPU seconds from its first plan to its second."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.cpu_s: list[float] = []

    def execute(self, plan: IterationPlan) -> RankReport:
        self.cpu_s.append(time.process_time())
        return RankReport(self.rank, plan.plan_id, 0, 0)

    def report(self) -> RankReport:
        return RankReport(self.rank, 0, 0, 0)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def answer_s(control: MpiControl, plan: IterationPlan) -> float:
    begin = time.perf_counter()
    control.publish(plan)
    while all(report.plan_id < plan.plan_id for report in control.collect()):
        time.sleep(20e-6)
    return time.perf_counter() - begin


world = init_mpi()
watchdog = start_watchdog(world, Topology(world.rank, 1, world.size), heartbeat_s=10)
if world.rank == 0:
    control = MpiControl(world, watchdog.check, watchdog.wake_others)
    answer_s(control, IterationPlan(1))
    before = time.process_time()
    time.sleep(float(sys.argv[1]))
    say(f"cpu_s={time.process_time() - before:.3f}")
    say(f"answer_s={answer_s(control, IterationPlan(2)):.6f}")
    control.publish(IterationPlan(3, shutdown=True))
else:
    control, worker = MpiWorkerControl(world, watchdog.check), IdleWorker(world.rank)
    loop.run(worker, control, Backoff(doze=watchdog.doze), watchdog.check)
    say(f"cpu_s={worker.cpu_s[1] - worker.cpu_s[0]:.3f}")
control.close()
finalize_mpi(world, watchdog.check)
watchdog.close()
