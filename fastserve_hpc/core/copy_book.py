"""The copies between the tiers: numbered when they begin, and known to be done in that order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from fastserve_hpc.core.block import Block
from fastserve_hpc.core.plan import BlockCopy


class CopyBook:
    """Copies from their beginning until every rank has done them."""

    def __init__(self) -> None:
        self.done = 0
        """The highest n such that every rank has done copies 1..n."""
        self._last = 0
        self._new: list[BlockCopy] = []
        self._in_flight: deque[tuple[int, Block]] = deque()

    def __len__(self) -> int:
        """Copies in flight."""
        return len(self._in_flight)

    def blocks(self) -> Iterator[Block]:
        """Whose copies are in flight; one may come more than once."""
        return (block for _, block in self._in_flight)

    def start(self, block: Block, to_device: bool) -> int:
        """Begin to copy a block between the slots that it has; the copy's number."""
        self._last += 1
        block.last_copy = self._last
        self._new.append(BlockCopy(self._last, block.device, block.host, to_device))
        self._in_flight.append((self._last, block))
        return self._last

    def take_new(self) -> tuple[BlockCopy, ...]:
        """The copies begun since the last call, for the next plan."""
        copies, self._new = tuple(self._new), []
        return copies

    def acknowledge(self, copy_id: int) -> list[Block]:
        """Every rank has done all copies up to this one; the blocks of which none is in flight any more."""
        self.done = max(self.done, copy_id)
        settled = []
        while self._in_flight and self._in_flight[0][0] <= copy_id:
            done, block = self._in_flight.popleft()
            if done == block.last_copy:
                settled.append(block)
        return settled
