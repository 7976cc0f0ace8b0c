"""Policies order requests; they know nothing of memory or batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fastserve_hpc.core.cost import CostModel
from fastserve_hpc.core.policy.base import Policy
from fastserve_hpc.core.policy.fcfs import Fcfs

POLICIES: Mapping[str, Callable[[int, CostModel], Policy]] = {Fcfs.name: lambda max_batch, cost: Fcfs()}  # noqa: ARG005
"""By name, from the batch limit and the costs as they are known."""


def make_policy(name: str, *, max_batch: int, cost: CostModel) -> Policy:
    """The policy that --policy names."""
    return POLICIES[name](max_batch, cost)
