"""Policies order requests; they know nothing of memory or batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fastserve_hpc.core.policy.base import Policy
from fastserve_hpc.core.policy.fcfs import Fcfs

POLICIES: Mapping[str, Callable[[], Policy]] = {Fcfs.name: Fcfs}


def make_policy(name: str) -> Policy:
    """The policy that --policy names."""
    return POLICIES[name]()
