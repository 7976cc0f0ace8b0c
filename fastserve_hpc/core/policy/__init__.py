"""Policies order requests; they know nothing of memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fastserve_hpc.core.cost import CostModel
from fastserve_hpc.core.policy.base import Policy
from fastserve_hpc.core.policy.clairvoyant import Oracle, Srpt
from fastserve_hpc.core.policy.fcfs import Fcfs
from fastserve_hpc.core.policy.mlfq import Mlfq, PaperSkipJoin
from fastserve_hpc.core.policy.skip_join import SkipJoin

POLICIES: Mapping[str, Callable[[int, CostModel], Policy]] = {
    Fcfs.name: lambda max_batch, cost: Fcfs(),  # noqa: ARG005
    Mlfq.name: lambda max_batch, cost: Mlfq(cost),  # noqa: ARG005
    PaperSkipJoin.name: lambda max_batch, cost: PaperSkipJoin(cost),  # noqa: ARG005
    SkipJoin.name: SkipJoin,
    Srpt.name: Srpt,
    Oracle.name: Oracle,
}
"""By name, from the batch limit and the costs as they are known."""


def make_policy(name: str, *, max_batch: int, cost: CostModel) -> Policy:
    """The policy that --policy names."""
    return POLICIES[name](max_batch, cost)
