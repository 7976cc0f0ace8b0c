"""What becomes of KV when the device is full: the choices, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvPolicy:
    """One way to deal with a full device tier."""

    name: str
    preempts: bool = True
    """A request takes the blocks of those behind it to be admitted; else it waits until some are free."""
    offloads: bool = False
    """Blocks that are taken go to the host first; else they are computed again."""
    is_early: bool = False
    """They go ahead of need, and come back ahead of need; else at the moment of need, and the batch waits."""
    by_enst: bool = False
    """Those leave first that will be scheduled last as `core/enst.py` estimates; else in the policy's order."""
    prefetches: bool = False
    """Where there is room, the next one comes back before it is its turn."""
    mirrors: bool = False
    """Full blocks of those that run are copied early, so that taking them needs no copy."""


KV_POLICIES: Mapping[str, KvPolicy] = {
    policy.name: policy
    for policy in (
        KvPolicy("proactive", offloads=True, is_early=True, by_enst=True, prefetches=True, mirrors=True),
        KvPolicy("reactive", offloads=True),
        KvPolicy("recompute"),
        KvPolicy("defer", preempts=False),
    )
}
"""What --kv-policy names."""


@dataclass(frozen=True, slots=True)
class CopyCosts:
    """Seconds that a block takes between the tiers, on the slowest rank."""

    to_host_s: float = 0.0
    to_device_s: float = 0.0
