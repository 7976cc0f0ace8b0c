"""Whose KV lies where: the block table of every sequence that holds memory."""

from __future__ import annotations

from fastserve_hpc.core.block_pool import BlockPool


class KvManager:
    """Block tables over a pool of device slots. Admits or refuses; who goes first is the policy's."""

    def __init__(self, num_blocks: int, block_size: int):
        if block_size < 1:
            raise ValueError(f"blocks of {block_size} tokens: at least 1 is needed")
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._tables: dict[int, list[int]] = {}

    @property
    def num_total(self) -> int:
        return self._pool.num_slots

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now."""
        return self._pool.num_free

    @property
    def num_used(self) -> int:
        """Blocks held by sequences, or still in use by plans in flight."""
        return self._pool.num_slots - self._pool.num_free

    @property
    def num_retiring(self) -> int:
        """Blocks that become free once plans in flight are done."""
        return self._pool.num_retiring

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_blocks(self, request_id: int) -> int:
        """Blocks that the request holds."""
        table = self._tables.get(request_id)
        return 0 if table is None else len(table)

    def table(self, request_id: int) -> tuple[int, ...]:
        """The request's slots, in the order of positions."""
        return tuple(self._tables.get(request_id, ()))

    def try_extend(self, request_id: int, num_tokens: int) -> tuple[int, ...] | None:
        """Make the request's blocks hold `num_tokens` positions.

        Returns the slots that this took, mostly none; None if they do not fit, then nothing has changed.
        """
        missing = self.blocks_for(num_tokens) - self.num_blocks(request_id)
        if missing <= 0:
            return ()
        slots = self._pool.take(missing)
        if slots is not None:
            self._tables.setdefault(request_id, []).extend(slots)
        return slots

    def free(self, request_id: int, last_plan_id: int) -> None:
        """Let go of a request's blocks. They can be taken once plan `last_plan_id`, the last to use them, is done."""
        table = self._tables.pop(request_id, None)
        if table is not None:
            self._pool.give_back(table, last_plan_id)

    def plan_done(self, plan_id: int) -> None:
        """The results of all plans up to this one are in."""
        self._pool.plan_done(plan_id)

    def holders(self) -> list[int]:
        """The requests that hold blocks."""
        return list(self._tables)

    def check(self) -> None:
        """Assert that no slot is in two tables and none is lost."""
        self._pool.check()
        slots = [slot for table in self._tables.values() for slot in table]
        assert len(slots) == len(set(slots)) == self._pool.num_held
        assert all(self._tables.values()), "an empty table is kept"
