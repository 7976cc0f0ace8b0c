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
    own_key, own_mask = host_key(), sum(1 << core for core in os.sched_getaffinity(0))
    places = [place.decode().split() for place in exchange(world, f"{own_key} {own_mask:x}".encode())]
    masks = [int(mask, 16) for key, mask in places if key == own_key]
    return len(masks) > functools.reduce(operator.or_, masks).bit_count()
