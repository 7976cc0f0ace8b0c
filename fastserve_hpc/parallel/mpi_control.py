"""The control plane over MPI: one eager message per rank and plan, not a collective.

In a broadcast tree a rank that is busy with its stage would hold up the ranks below it.
"""

from __future__ import annotations

import time

from fastserve_hpc.core.plan import IterationPlan, RankReport
from fastserve_hpc.errors import RankError
from fastserve_hpc.parallel.comm import Hook, do_nothing
from fastserve_hpc.parallel.control import PlanCodec
from fastserve_hpc.parallel.idle import DOZE_AFTER_S, Waiter
from fastserve_hpc.parallel.mpi_api import MPI

_COORDINATOR = 0
_PLAN_TAG = 1
_REPORT_TAG = 2


class _Outbox:
    """Messages under way. A request keeps its bytes alive until it is done."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._requests: list[MPI.Request] = []

    def send(self, data: bytes, rank: int, tag: int) -> None:
        self._requests.append(self._comm.Isend([data, MPI.BYTE], rank, tag))

    def is_empty(self) -> bool:
        """Whether everything has left; asking moves what is under way."""
        self._requests = [request for request in self._requests if not request.Test()]
        return not self._requests


class _Inbox:
    """Takes in messages of unknown length, one after the other, without waiting for any."""

    def __init__(self, comm: MPI.Intracomm, source: int, tag: int) -> None:
        self._comm = comm
        self._source = source
        self._tag = tag
        self._status = MPI.Status()
        self._data = bytearray()
        self._request: MPI.Request | None = None

    def receive(self) -> bytearray | None:
        """The next whole message; None while it is not here or has only begun to arrive."""
        if self._request is None and not self._begin():
            return None
        if self._request is None or not self._request.Test():
            return None
        self._request = None
        return self._data

    def _begin(self) -> bool:
        message = self._comm.Improbe(self._source, self._tag, self._status)
        if message is None:
            return False
        self._data = bytearray(self._status.Get_count(MPI.BYTE))
        self._request = message.Irecv([self._data, MPI.BYTE])
        return True


class MpiControl:
    """`Control` of rank 0. Making one is collective: the other ranks make a `MpiWorkerControl` at the same time.

    `wake` is called with the first plan after a pause in which the others may have begun to doze.
    """

    def __init__(self, world: MPI.Intracomm, check: Hook = do_nothing, wake: Hook = do_nothing) -> None:
        self._wake = wake
        self._published_at = float("-inf")
        comm = world.Dup()
        self._others = range(1, comm.size)
        self._codec = PlanCodec()
        self._outbox = _Outbox(comm)
        self._inbox = _Inbox(comm, MPI.ANY_SOURCE, _REPORT_TAG)
        self._waiter = Waiter(check)

    def publish(self, plan: IterationPlan) -> None:
        data = self._codec.encode(plan)
        for rank in self._others:
            self._outbox.send(data, rank, _PLAN_TAG)
        now = time.monotonic()
        if now - self._published_at > DOZE_AFTER_S / 2:
            self._wake()
        self._published_at = now

    def collect(self) -> list[RankReport]:
        self._outbox.is_empty()
        reports = []
        while (data := self._inbox.receive()) is not None:
            reports.append(self._codec.decode_report(data))
        return reports

    def close(self) -> None:
        self._waiter.until(self._outbox.is_empty)


class MpiWorkerControl:
    """`WorkerControl` of the ranks other than 0; see `MpiControl`."""

    def __init__(self, world: MPI.Intracomm, check: Hook = do_nothing) -> None:
        comm = world.Dup()
        self._codec = PlanCodec()
        self._outbox = _Outbox(comm)
        self._inbox = _Inbox(comm, _COORDINATOR, _PLAN_TAG)
        self._waiter = Waiter(check)
        self._last_plan_id = 0

    def next_plan(self) -> IterationPlan | None:
        self._outbox.is_empty()
        data = self._inbox.receive()
        if data is None:
            return None
        plan = self._codec.decode_plan(data)
        if plan.plan_id != self._last_plan_id + 1:
            raise RankError(f"plan {plan.plan_id} came after plan {self._last_plan_id}: the control plane lost one")
        self._last_plan_id = plan.plan_id
        return plan

    def report(self, report: RankReport) -> None:
        self._outbox.send(self._codec.encode(report), _COORDINATOR, _REPORT_TAG)

    def close(self) -> None:
        self._waiter.until(self._outbox.is_empty)
