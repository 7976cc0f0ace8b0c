"""The data plane over MPI, for CPU ranks: stage links and the collectives of a stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from fastserve_hpc.parallel.comm import Hook, do_nothing
from fastserve_hpc.parallel.hosts import is_crowded
from fastserve_hpc.parallel.idle import SPIN_CROWDED_S, SPIN_S, Waiter
from fastserve_hpc.parallel.mpi_api import MPI
from fastserve_hpc.parallel.mpi_group import MpiGroup
from fastserve_hpc.parallel.mpi_links import RecvLink, SendLink
from fastserve_hpc.parallel.topology import Topology


class Collectives(Protocol):
    """What the ranks of a stage do together."""

    @property
    def shared(self) -> Any | None:
        """See `TensorComm.shared`."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `TensorComm.all_reduce`."""

    def all_gather(self, x: Tensor) -> Tensor:
        """See `TensorComm.all_gather`."""

    def gather(self, x: Tensor) -> Tensor:
        """See `TensorComm.gather`."""


MakeCollectives = Callable[[MPI.Intracomm, Waiter], Collectives]
"""Collective over the communicator of a stage."""


class MpiTensorComm:
    """`TensorComm` over MPI. Making one is collective over `world`.

    `max_link_bytes`: the largest hidden state, max_batch_tokens * hidden_size * bytes per element.
    `check` raises once a rank is lost; every wait calls it. `make_collectives` is called with the communicator of this
    rank's stage, in tp_rank order: the place for collectives through the node's shared memory.
    """

    def __init__(
        self,
        world: MPI.Intracomm,
        topology: Topology,
        max_link_bytes: int,
        check: Hook = do_nothing,
        make_collectives: MakeCollectives = MpiGroup,
    ) -> None:
        self._waiter = Waiter(check, SPIN_CROWDED_S if is_crowded(world) else SPIN_S)
        links = world.Dup()
        stage_comm = MPI.Intracomm(world.Split(topology.stage, topology.tp_rank))
        self._collectives = make_collectives(stage_comm, self._waiter)
        previous_rank, next_rank = topology.previous_rank, topology.next_rank
        self._recv = None if previous_rank is None else RecvLink(links, previous_rank, max_link_bytes, self._waiter)
        self._send = None if next_rank is None else SendLink(links, next_rank, max_link_bytes, self._waiter)

    @property
    def shared(self) -> Any | None:
        return self._collectives.shared

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._collectives.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._collectives.all_gather(x)

    def gather(self, x: Tensor) -> Tensor:
        return self._collectives.gather(x)

    def send_next(self, x: Tensor) -> None:
        if self._send is None:
            raise RuntimeError("the last stage has no next stage to send to")
        self._send.send(x)

    def recv_prev(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> Tensor:
        if self._recv is None:
            raise RuntimeError("the first stage has no stage before it to receive from")
        return self._recv.receive(num_tokens, hidden_size, dtype)

    def progress(self) -> None:
        if self._send is not None:
            self._send.progress()
        if self._recv is not None:
            self._recv.progress()
        self._waiter.run_hook()

    def set_progress_hook(self, hook: Hook) -> None:
        self._waiter.set_hook(hook)

    def close(self) -> None:
        self._waiter.set_hook(do_nothing)
        if self._send is not None:
            self._send.flush()
        if self._recv is not None:
            self._recv.close()
