"""Policies order requests; they know nothing of memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fastserve_hpc.core.cost import CostModel
from fastserve_hpc.core.policy.base import Policy
from fastserve_hpc.core.policy.clairvoyant import Oracle, Srpt
from fastserve_hpc.core.policy.fcfs import Fcfs
from fastserve_hpc.core.policy.mlfq import Mlfq, PaperSkipJoin
from fastserve_hpc.core.policy.sizing import SkipJoinRules
from fastserve_hpc.core.policy.skip_join import SkipJoin

POLICIES: Mapping[str, Callable[[int, CostModel, int], Policy]] = {
    Fcfs.name: lambda max_batch, cost, num_stages: Fcfs(),  # noqa: ARG005
    Mlfq.name: lambda max_batch, cost, num_stages: Mlfq(cost, num_stages),  # noqa: ARG005
    PaperSkipJoin.name: lambda max_batch, cost, num_stages: PaperSkipJoin(cost, num_stages),  # noqa: ARG005
    SkipJoin.name: lambda max_batch, cost, num_stages: SkipJoin(max_batch, cost, num_stages=num_stages),
    Srpt.name: lambda max_batch, cost, num_stages: Srpt(max(1, max_batch // num_stages), cost),
    Oracle.name: lambda max_batch, cost, num_stages: Oracle(max(1, max_batch // num_stages), cost),
}
"""By name, from the batch limit, the costs of a stage as they are known, and the number of stages."""


def make_policy(
    name: str, *, max_batch: int, cost: CostModel, num_stages: int = 1, rules: SkipJoinRules | None = None
) -> Policy:
    """The policy that --policy names. `rules` are for skip-join alone."""
    if name == SkipJoin.name:
        return SkipJoin(max_batch, cost, rules, num_stages)
    return POLICIES[name](max_batch, cost, num_stages)
