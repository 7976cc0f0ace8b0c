"""Copies of KV between the tiers, under the virtual clock: both ways at once, and beside the compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fastserve_hpc.core.kv_policy import CopyCosts
from fastserve_hpc.core.plan import BlockCopy


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What joins the tiers of one rank. All ranks copy their parts at the same time."""

    block_bytes: float = 0.0
    """Of a block on one rank."""
    to_host: float = 24e9
    """Bytes a second."""
    to_device: float = 24e9
    launch_s: float = 10e-6
    """What every copy takes beside its bytes."""
    is_coalesced: bool = True
    """Neighbouring blocks go in one copy; else every block in one of its own."""

    @property
    def costs(self) -> CopyCosts:
        """As the scheduler is told them: of a block alone."""
        return CopyCosts(
            self.block_bytes / self.to_host + self.launch_s, self.block_bytes / self.to_device + self.launch_s
        )


class SimulatedCopies:
    """When copies are done."""

    def __init__(self, link: Link):
        self._link = link
        self._free = [0.0, 0.0]
        """When the ways to the host and to the device are free."""
        self._open: deque[tuple[int, float]] = deque()
        """(number, when it is done), by number."""
        self._uploads: deque[tuple[int, float]] = deque()
        self._last = 0

    def start(self, copies: Sequence[BlockCopy], now: float) -> None:
        done: dict[int, float] = {}
        for to_device in (False, True):
            rate = self._link.to_device if to_device else self._link.to_host
            at = max(now, self._free[to_device])
            for run in self._pieces([copy for copy in copies if copy.to_device == to_device]):
                at += self._link.launch_s + len(run) * self._link.block_bytes / rate
                done.update((copy.copy_id, at) for copy in run)
                self._free[to_device] = at
        self._open.extend((copy.copy_id, done[copy.copy_id]) for copy in copies)
        self._uploads.extend((copy.copy_id, done[copy.copy_id]) for copy in copies if copy.to_device)
        self._last = copies[-1].copy_id

    def _pieces(self, copies: list[BlockCopy]) -> Iterator[list[BlockCopy]]:
        run: list[BlockCopy] = []
        for copy in copies:
            if run and not (self._link.is_coalesced and _is_next(run[-1], copy)):
                yield run
                run = []
            run.append(copy)
        if run:
            yield run

    def done(self, now: float) -> int:
        """The highest n such that copies 1..n are done."""
        while self._open and self._open[0][1] <= now:
            self._open.popleft()
        return self._open[0][0] - 1 if self._open else self._last

    def next_s(self) -> float | None:
        """When `done` grows next; None if nothing is in flight."""
        return self._open[0][1] if self._open else None

    def uploaded_s(self, copy_id: int) -> float:
        """When the uploads up to this number are done."""
        at = 0.0
        while self._uploads and self._uploads[0][0] <= copy_id:
            at = self._uploads.popleft()[1]
        return at


def _is_next(copy: BlockCopy, other: BlockCopy) -> bool:
    return (other.device_slot, other.host_slot) == (copy.device_slot + 1, copy.host_slot + 1)
