"""The data plane of a world of one rank: nothing to move."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastserve_hpc.parallel.comm import Hook, do_nothing

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class SingleComm:
    """`TensorComm` of one rank."""

    def __init__(self) -> None:
        self._hook: Hook = do_nothing

    @property
    def shared(self) -> None:
        return None

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor:
        return x

    def send_next(self, x: Tensor) -> None:
        raise RuntimeError(f"a single rank has no next stage to send {tuple(x.shape)} to")

    def recv_prev(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> Tensor:
        raise RuntimeError(f"a single rank has no stage before it to send ({num_tokens}, {hidden_size}) {dtype}")

    def progress(self) -> None:
        self._hook()

    def set_progress_hook(self, hook: Hook) -> None:
        self._hook = hook

    def close(self) -> None:
        self._hook = do_nothing
