"""The data plane over torch.distributed: NCCL on GPUs, gloo in tests; one code for both."""

from __future__ import annotations

import os
import secrets
import socket
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from fastserve_hpc.errors import RankError
from fastserve_hpc.parallel.addresses import LOOPBACK, local_addresses
from fastserve_hpc.parallel.comm import Hook, do_nothing
from fastserve_hpc.parallel.hosts import share_one_host
from fastserve_hpc.parallel.mpi_init import exchange
from fastserve_hpc.parallel.topology import Topology

if TYPE_CHECKING:
    from fastserve_hpc.parallel.mpi_api import MPI

_MAX_SENDS = 2
_STORE_TIMEOUT = timedelta(seconds=120)
_ADDRESS_TIMEOUT = timedelta(seconds=5)


class TorchTensorComm:
    """`TensorComm` over a torch process group. Making one is collective over `world`, which only brings ranks together.

    With NCCL nothing here holds up the host: waits are ordered on the GPU's stream. With gloo a wait blocks; the
    watchdog, not the wait, ends a rank whose partner is lost.
    """

    def __init__(self, world: MPI.Intracomm, topology: Topology, device: torch.device) -> None:
        self._topology = topology
        self._device = device
        self._hook: Hook = do_nothing
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()
        dist.init_process_group(
            backend="nccl" if device.type == "cuda" else "gloo",
            store=_open_store(world),
            rank=topology.rank,
            world_size=topology.world_size,
            device_id=device if device.type == "cuda" else None,
        )
        self._stage_group = self._make_stage_groups()

    @property
    def shared(self) -> None:
        return None

    def _make_stage_groups(self) -> dist.ProcessGroup | None:
        """This rank's group. Every rank takes part in the making of every group."""
        tp_size = self._topology.tp_size
        own = None
        for start in range(0, self._topology.world_size, tp_size):
            ranks = list(range(start, start + tp_size))
            group = dist.new_group(ranks)
            own = group if self._topology.rank in ranks else own
        return own

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._topology.tp_size == 1 or x.numel() == 0:
            return x
        own = x.contiguous()
        dist.all_reduce(own, group=self._stage_group)
        return x if own is x else x.copy_(own)

    def all_gather(self, x: Tensor) -> Tensor:
        if self._topology.tp_size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self._topology.tp_size)]
        dist.all_gather(parts, x.contiguous(), group=self._stage_group)
        return torch.cat(parts, dim=-1)

    def gather(self, x: Tensor) -> Tensor:
        """As quick as any: NCCL has no gather of its own."""
        joined = self.all_gather(x)
        return joined if self._topology.tp_rank == 0 else x

    def send_next(self, x: Tensor) -> None:
        rank = self._topology.next_rank
        if rank is None:
            raise RuntimeError("the last stage has no next stage to send to")
        if len(self._sends) == _MAX_SENDS:
            self._finish_oldest_send()
        own = x.clone(memory_format=torch.contiguous_format)
        work = dist.isend(own, rank)
        if work is not None:
            self._sends.append((work, own))

    def recv_prev(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> Tensor:
        rank = self._topology.previous_rank
        if rank is None:
            raise RuntimeError("the first stage has no stage before it to receive from")
        x = torch.empty(num_tokens, hidden_size, dtype=dtype, device=self._device)
        work = dist.irecv(x, rank)
        if work is not None:
            work.wait()
        return x

    def progress(self) -> None:
        self._hook()

    def set_progress_hook(self, hook: Hook) -> None:
        self._hook = hook

    def close(self) -> None:
        self._hook = do_nothing
        while self._sends:
            self._finish_oldest_send()
        dist.destroy_process_group()

    def _finish_oldest_send(self) -> None:
        work, _ = self._sends.popleft()
        work.wait()


class _StoreAddress(msgspec.Struct, frozen=True):
    addresses: list[str]
    port: int
    token: str


def _open_store(world: MPI.Intracomm) -> Store:
    """A store on rank 0 that all ranks are connected to; its port is chosen by the kernel and published over MPI."""
    one_host = share_one_host(world)
    if one_host:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if world.rank != 0:
        return _join_store(msgspec.json.decode(exchange(world, b"")[0], type=_StoreAddress))
    listener = socket.create_server((LOOPBACK if one_host else "", 0))
    addresses = [LOOPBACK] if one_host else local_addresses()
    where = _StoreAddress(addresses, listener.getsockname()[1], secrets.token_hex(16))
    store = TCPStore(
        LOOPBACK,
        where.port,
        is_master=True,
        wait_for_workers=False,
        timeout=_STORE_TIMEOUT,
        master_listen_fd=listener.detach(),
    )
    store.set(where.token, where.token)
    exchange(world, msgspec.json.encode(where))
    return PrefixStore(where.token, store)


def _join_store(where: _StoreAddress) -> Store:
    # An address of rank 0's host may be another machine's here (a container bridge): only the token proves the store.
    for address in where.addresses:
        try:
            store = TCPStore(address, where.port, is_master=False, wait_for_workers=False, timeout=_ADDRESS_TIMEOUT)
            if store.get(where.token).decode() == where.token:
                store.set_timeout(_STORE_TIMEOUT)
                return PrefixStore(where.token, store)
        except RuntimeError:
            continue
    raise RankError(
        f"rank 0's store answers at none of {', '.join(where.addresses)} port {where.port}: "
        "does a firewall stand between the nodes?"
    )
