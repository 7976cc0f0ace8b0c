"""The data plane as models and workers see it: one protocol, whatever moves the bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Hook = Callable[[], None]


def do_nothing() -> None:
    """The hook of a rank that has nothing else to do."""


class TensorComm(Protocol):
    """Moves tensors between the ranks of a stage and from stage to stage. Only the main thread calls it.

    Every wait calls the progress hook and ends with `RankError` once a rank is lost.
    """

    @property
    def shared(self) -> Any | None:
        """Memory that the stage's ranks share, for operations that sum inside; None where there is none such.

        What uses it counts as one of the calls here: every rank makes the same ones in the same order.
        """

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x` over the stage's ranks, in place; returns `x`. The bits are the same on all of them.

        Sums are taken in float32 and rounded once. Every rank passes the same shape and dtype.
        """

    def all_gather(self, x: Tensor) -> Tensor:
        """The stage's `x` [..., n], joined along the last dimension in tp_rank order: [..., tp_size * n]."""

    def gather(self, x: Tensor) -> Tensor:
        """`all_gather` for tp_rank 0 alone; every other rank gets its own `x`."""

    def send_next(self, x: Tensor) -> None:
        """Start sending `x` [num_tokens, hidden_size] to the same tp_rank of the next stage.

        Returns before it has arrived; `x` may be changed at once. Waits only while two earlier ones are under way.
        """

    def recv_prev(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> Tensor:
        """The next tensor [num_tokens, hidden_size] from the stage before, in the order of sending.

        The caller may change it; it is overwritten after the next `recv_prev`.
        """

    def progress(self) -> None:
        """Move what is under way and call the progress hook; cheap, for use between layers."""

    def set_progress_hook(self, hook: Hook) -> None:
        """Call `hook` in `progress()` and while waiting: on rank 0 it takes in results. It must not use this object."""

    def close(self) -> None:
        """Wait until everything sent has left. Nothing may be called afterwards."""
