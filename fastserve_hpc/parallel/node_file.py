"""A file in memory that the ranks of a node share."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fastserve_hpc.parallel.addresses import host_key
from fastserve_hpc.parallel.comm import Hook, do_nothing

if TYPE_CHECKING:
    from fastserve_hpc.parallel.mpi_api import MPI

_DIRECTORY = "/dev/shm"


@contextmanager
def open_node_file(world: MPI.Intracomm | None, check: Hook = do_nothing) -> Iterator[int]:
    """The descriptor of a new file, empty and without a name, the same for all ranks of a host; collective.

    A rank that cannot see the others' (containers with memory of their own) gets one for itself.
    """
    descriptor = _alone() if world is None else _share(world, check)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _share(world: MPI.Intracomm, check: Hook) -> int:
    from fastserve_hpc.parallel.mpi_init import exchange

    keys = exchange(world, host_key().encode(), None, check)
    leader = keys.index(keys[world.rank])
    made, path = _create() if leader == world.rank else (-1, "")
    name = exchange(world, path.encode(), None, check)[leader].decode()
    descriptor = made if leader == world.rank else _open(name)
    exchange(world, b"", None, check)  # all have opened it
    if path:
        Path(path).unlink()
    return descriptor


def _create() -> tuple[int, str]:
    try:
        return tempfile.mkstemp(prefix="fastserve-", dir=_DIRECTORY)
    except OSError:
        return _alone(), ""


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return _alone()


def _alone() -> int:
    return os.memfd_create("fastserve", os.MFD_CLOEXEC)
