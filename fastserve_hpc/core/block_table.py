"""The blocks of one sequence, from its admission to its end."""

from __future__ import annotations

from fastserve_hpc.core.block import Block
from fastserve_hpc.core.block_store import BlockStore
from fastserve_hpc.core.prefix_cache import PrefixCache
from fastserve_hpc.core.sequence import Sequence


class BlockTable:
    """In the order of positions. Pinned, all of them are on the device or on the way there: the sequence may run."""

    def __init__(self, sequence: Sequence, store: BlockStore, cache: PrefixCache, block_size: int):
        self.sequence = sequence
        self.blocks: list[Block] = []
        self.is_pinned = False
        self._store = store
        self._cache = cache
        self._block_size = block_size
        self._pinned: list[Block] = []
        """While it is being admitted: those that are pinned already."""
        self._num_own = 0
        """Likewise: blocks that it had before."""
        self._num_mirrored = 0
        """So many of the first were copied to the host early."""

    def slots(self) -> tuple[int, ...]:
        """On the device."""
        return tuple([block.device for block in self.blocks])

    # Admission: `begin`, then `complete` or `cancel`.

    def begin(self, plan_id: int, uploads: bool) -> int | None:
        """Pin what is on the device of the sequence's own blocks and of its prefix; with `uploads` take the rest of
        its prefix from the host.

        Returns how many blocks of the device it still needs; None where another sequence computes its prefix in
        this plan: then it has no blocks.
        """
        sequence = self.sequence
        self._trim()
        self._num_own = len(self.blocks)
        if self._num_own * self._block_size <= sequence.num_planned or not self._num_own:
            found, waits = self._cache.match(sequence, self._num_own, plan_id, uploads)
            if waits and not self._num_own:
                return None
            self._store.hold(found)
            self.blocks += found
        self._pinned = [block for block in self.blocks if block.device >= 0]
        self._store.pin(self._pinned)
        return self._blocks_for(sequence.num_tokens) - len(self._pinned)

    def cancel(self) -> None:
        """As if `begin` had not been called."""
        self._store.unpin(self._pinned, 0)
        self._store.drop(self.blocks[self._num_own :])
        del self.blocks[self._num_own :]
        self._pinned = []

    def complete(self) -> int:
        """Take blocks for all known tokens, and begin to upload those that are on the host; they must fit.

        Returns the positions whose KV the sequence has then.
        """
        sequence, blocks = self.sequence, self.blocks
        covered = len(blocks) * self._block_size
        if self._num_own * self._block_size > sequence.num_planned:
            covered = sequence.num_planned
        self._store.upload([block for block in blocks if block.device < 0])
        blocks += self._store.take(self._blocks_for(sequence.num_tokens) - len(blocks)) or ()
        self.is_pinned, self._pinned, self._num_mirrored = True, [], 0
        self._cache.announce(sequence, blocks, covered // self._block_size)
        return covered

    # While it is pinned.

    def upload(self) -> int:
        """The copy that the sequence must wait for; 0: all of its blocks are there."""
        last = max([block.upload for block in self.blocks])
        return last if last > self._store.copies_done else 0

    def resume(self) -> tuple[int, ...]:
        """The sequence runs again: all of its slots. Its last block changes from now on."""
        index, offset = divmod(self.sequence.num_planned, self._block_size)
        if offset:
            self._store.spoil(self.blocks[index])
        return self.slots()

    def extend(self, num_tokens: int) -> tuple[int, ...] | None:
        """Hold `num_tokens` positions: the slots that this took; None if they do not fit, then nothing has changed."""
        missing = self._blocks_for(num_tokens) - len(self.blocks)
        if missing <= 0:
            return ()
        blocks = self._store.take(missing)
        if blocks is None:
            return None
        self.blocks += blocks
        return tuple([block.device for block in blocks])

    def mirror(self, most: int) -> int:
        """Copy up to so many full blocks to the host early; how many that were."""
        first, end = self._num_mirrored, self.sequence.num_planned // self._block_size
        blocks = self.blocks[first : min(end, first + most)]
        self._num_mirrored += len(blocks)
        done = self._store.copies_done
        return self._store.mirror([b for b in blocks if b.host < 0 and b.upload <= done], is_early=True)

    def unpin(self) -> None:
        """The sequence does not run for now."""
        self._cut()
        self._store.unpin(self.blocks, self.sequence.last_plan_id)
        self.is_pinned = False

    # The end.

    def drop(self) -> None:
        """Let go of all blocks; it is not pinned."""
        self._store.drop(self.blocks)
        self.blocks.clear()

    def finish(self) -> None:
        """The sequence has ended. The content of its full blocks stays for others until the slots are needed."""
        self._trim()
        self._cut()
        self._cache.add_outputs(self.sequence, self.blocks)
        self._let_go()

    def give_up(self) -> None:
        """The sequence goes on without what it has computed."""
        self._cut()
        self._let_go()

    def condemn(self) -> None:
        """What the sequence has computed is no good: nobody else will share it."""
        self._cut()
        for block in self.blocks:
            self._store.forget(block)
        self.sequence.keys = None

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _trim(self) -> None:
        """Drop what is lost, and what comes after it. Nothing that is pinned is."""
        for i, block in enumerate(self.blocks):
            if block.is_lost:
                self._store.drop(self.blocks[i:])
                del self.blocks[i:]
                return

    def _cut(self) -> None:
        """Let go of blocks that have no content yet."""
        self._cache.withdraw(self.sequence, self.blocks)
        num_filled = self._blocks_for(self.sequence.num_planned)
        empty = self.blocks[num_filled:]
        if self.is_pinned:
            self._store.unpin(empty, self.sequence.last_plan_id)
        self._store.drop(empty)
        del self.blocks[num_filled:]

    def _let_go(self) -> None:
        if self.is_pinned:
            self._store.unpin(self.blocks, self.sequence.last_plan_id)
        self._store.drop(self.blocks)

    def check(self) -> None:
        """Assert the invariants between two calls of the scheduler."""
        assert not self._pinned, "its admission has not ended"
        assert len(set(self.blocks)) == len(self.blocks) > 0
