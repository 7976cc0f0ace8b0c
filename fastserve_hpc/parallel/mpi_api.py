"""The one place that imports mpi4py, told first to leave the start and the end of MPI to `mpi_init`."""

from __future__ import annotations

import mpi4py

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False

from mpi4py import MPI  # noqa: E402

__all__ = ["MPI"]
