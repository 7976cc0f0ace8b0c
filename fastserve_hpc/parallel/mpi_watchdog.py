"""Watchdogs that find each other over MPI, which also carries their secret."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fastserve_hpc.parallel.hosts import share_one_host
from fastserve_hpc.parallel.mpi_init import exchange
from fastserve_hpc.parallel.topology import Topology
from fastserve_hpc.parallel.watchdog import OnAbort, Watchdog, ignore
from fastserve_hpc.parallel.watchdog_join import Listener, Rendezvous

if TYPE_CHECKING:
    from fastserve_hpc.parallel.mpi_api import MPI


def start_watchdog(
    world: MPI.Intracomm, topology: Topology, heartbeat_s: float, on_abort: OnAbort = ignore
) -> Watchdog:
    """Start this rank's watchdog; collective over `world`. See `Watchdog.start`."""
    one_host = share_one_host(world)
    if topology.is_coordinator:
        listener = Listener(one_host)
        exchange(world, msgspec.msgpack.encode(listener.rendezvous))
        return Watchdog.start(topology, listener, heartbeat_s, on_abort)
    rendezvous = msgspec.msgpack.decode(exchange(world, b"")[0], type=Rendezvous)
    return Watchdog.start(topology, rendezvous, heartbeat_s, on_abort)
