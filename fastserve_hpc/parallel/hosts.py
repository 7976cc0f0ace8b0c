"""Which ranks share a host, and whether its cores suffice for them."""

from __future__ import annotations

import functools
import operator
import os
from typing import TYPE_CHECKING

from fastserve_hpc.parallel.addresses import host_key
from fastserve_hpc.parallel.mpi_init import exchange

if TYPE_CHECKING:
    from fastserve_hpc.parallel.mpi_api import MPI


def share_one_host(world: MPI.Intracomm) -> bool:
    """Whether all ranks reach each other by the loopback address; collective."""
    return len(set(exchange(world, host_key().encode()))) == 1


def is_crowded(world: MPI.Intracomm) -> bool:
    """Whether this host has more ranks than cores that they may run on; collective."""
    masks = _masks_here(world)
    return len(masks) > functools.reduce(operator.or_, masks).bit_count()


def threads_of_this_rank(world: MPI.Intracomm) -> int:
    """How many threads this rank should compute with; collective.

    Its share of the cores that it may run on; ranks bound to cores of their own share none. Where ranks are more than
    cores, two: those of a stage wait for each other, and a core that one leaves is then used by the one it waits for.
    """
    own = _own_mask()
    sharing = sum(1 for mask in _masks_here(world) if mask & own)
    cores = own.bit_count()
    return cores // sharing if sharing <= cores else min(2, cores)


def _own_mask() -> int:
    return sum(1 << core for core in os.sched_getaffinity(0))


def _masks_here(world: MPI.Intracomm) -> list[int]:
    """The cores of each rank on this host, as bits; collective."""
    own_key = host_key()
    places = [place.decode().split() for place in exchange(world, f"{own_key} {_own_mask():x}".encode())]
    return [int(mask, 16) for key, mask in places if key == own_key]
