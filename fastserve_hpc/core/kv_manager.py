"""Whose KV lies where: the blocks of every sequence that has any."""

from __future__ import annotations

from dataclasses import asdict

from fastserve_hpc.core.block import Block
from fastserve_hpc.core.block_store import BlockStore
from fastserve_hpc.core.block_table import BlockTable
from fastserve_hpc.core.cost import Costs
from fastserve_hpc.core.kv_counters import KvCounters
from fastserve_hpc.core.kv_policy import KV_POLICIES, CopyCosts, KvPolicy
from fastserve_hpc.core.plan import BlockCopy
from fastserve_hpc.core.prefix_cache import PrefixCache
from fastserve_hpc.core.sequence import Sequence


class KvManager:
    """Block tables over two tiers. Admits or refuses; who goes first is the policy's.

    A sequence is *resident*: its blocks stay on the device; or *parked*: they stay on the host where they have
    been copied there, and on the device until somebody needs the slots; or it has none.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        *,
        policy: KvPolicy = KV_POLICIES["recompute"],
        salt: bytes | None = None,
        copy_costs: CopyCosts | None = None,
        block_bytes: int = 0,
        last_plan_id: int = 0,
    ):
        """`salt`, a secret of at most 64 bytes, keys the names of the prefix cache; None: there is no such cache.

        `block_bytes`, over all ranks, is for the counters. The ranks have computed all plans up to `last_plan_id`.
        """
        if block_size < 1:
            raise ValueError(f"blocks of {block_size} tokens: at least 1 is needed")
        self.block_size = block_size
        self.policy = policy
        self.copy_costs = copy_costs or CopyCosts()
        self.block_bytes = block_bytes
        self.counters = KvCounters()
        self._store = BlockStore(num_blocks, num_host_blocks)
        self._store.plan_done(last_plan_id)
        self._cache = PrefixCache(self._store, block_size, salt)
        self._tables: dict[int, BlockTable] = {}

    @property
    def num_total(self) -> int:
        return self._store.num_device

    @property
    def num_free(self) -> int:
        """Blocks of the device that can be taken now."""
        return self._store.num_free

    @property
    def num_used(self) -> int:
        """Blocks of the device that sequences need, or plans and copies in flight."""
        return self._store.num_device - self._store.num_free

    @property
    def num_retiring(self) -> int:
        """Blocks that become free once plans and copies in flight are done."""
        return self._store.num_settling

    @property
    def num_host_total(self) -> int:
        return self._store.num_host

    @property
    def num_host_used(self) -> int:
        """Blocks of the host that parked sequences need, or copies in flight."""
        return self._store.num_host - self._store.num_free_host

    @property
    def copies_in_flight(self) -> int:
        return self._store.copies_in_flight

    @property
    def num_offloaded(self) -> int:
        """Blocks copied to the host since the start."""
        return self._store.num_offloaded

    @property
    def num_uploaded(self) -> int:
        """Blocks brought back to the device since the start."""
        return self._store.num_uploaded

    def details(self) -> dict[str, float]:
        """What `status` shows, by name."""
        return {
            **asdict(self.counters),
            "offloaded_blocks": self.num_offloaded,
            "offloaded_bytes": self.num_offloaded * self.block_bytes,
            "uploaded_blocks": self.num_uploaded,
            "uploaded_bytes": self.num_uploaded * self.block_bytes,
        }

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def why_never(self, sequence: Sequence) -> str | None:
        """Why the device can never hold all of a sequence's KV, with the numbers; None if it can."""
        needed, size, total = self.blocks_for(sequence.max_computed), self.block_size, self.num_total
        if needed <= total:
            return None
        return (
            f"prompt ({sequence.num_prompt} tokens) + max_tokens ({sequence.max_tokens}) need {needed} KV blocks of "
            f"{size} tokens, but the cache has {total} ({total * size} tokens): ask for fewer tokens or serve with a "
            "larger --device-kv"
        )

    def num_blocks(self, request_id: int) -> int:
        """Blocks that the request has, wherever they are."""
        table = self._tables.get(request_id)
        return 0 if table is None else len(table.blocks)

    def table(self, request_id: int) -> tuple[int, ...]:
        """A resident request's slots on the device, in the order of positions."""
        table = self._tables.get(request_id)
        return () if table is None else table.slots()

    def residents(self) -> list[int]:
        """The requests whose blocks stay on the device."""
        return [request_id for request_id, table in self._tables.items() if table.is_pinned]

    def parked(self) -> list[int]:
        """The requests that have KV, but do not run."""
        return [request_id for request_id, table in self._tables.items() if not table.is_pinned]

    # Admission: `begin`, then `complete` or `cancel`.

    def begin(self, sequence: Sequence, plan_id: int, costs: Costs | None = None) -> int | None:
        """Pin what there is on the device of a sequence that is not resident: its own, or of its prefix.

        Returns how many blocks of the device it still needs; None where another sequence computes its prefix in
        this plan: then nothing has changed.
        """
        request_id = sequence.request_id
        table = self._tables.get(request_id)
        if table is None:
            table = BlockTable(sequence, self._store, self._cache, self.block_size)
        uploads = costs is None or self.copy_costs.to_device_s < costs.prefill_token_s * self.block_size
        needed = table.begin(plan_id, uploads)
        if needed is None:
            self._tables.pop(request_id, None)
        else:
            self._tables[request_id] = table
        return needed

    def cancel(self, sequence: Sequence) -> None:
        """It does not fit: as if `begin` had not been called."""
        table = self._tables[sequence.request_id]
        table.cancel()
        if not table.blocks:
            del self._tables[sequence.request_id]

    def complete(self, sequence: Sequence) -> int:
        """Give it all blocks of its known tokens, and begin to upload those that are on the host; they must fit.

        Returns the positions whose KV it has then.
        """
        covered = self._tables[sequence.request_id].complete()
        self.counters.admitted(sequence, covered)
        return covered

    def upload_of(self, request_id: int) -> int:
        """The copy that a resident request must wait for; 0: all of its blocks are there."""
        return self._tables[request_id].upload()

    def resume(self, sequence: Sequence) -> tuple[int, ...]:
        """A resident sequence runs again: all of its slots. Its last block changes from now on."""
        return self._tables[sequence.request_id].resume()

    # Resident sequences.

    def try_extend(self, request_id: int, num_tokens: int) -> tuple[int, ...] | None:
        """Make a resident request's blocks hold `num_tokens` positions.

        Returns the slots that this took, mostly none; None if they do not fit, then nothing has changed.
        """
        return self._tables[request_id].extend(num_tokens)

    def note_prompt(self, sequence: Sequence, start: int, end: int, plan_id: int) -> None:
        """Plan `plan_id` computes positions [start, end), which begin in the prompt."""
        blocks = self._tables[sequence.request_id].blocks
        self._cache.note_written(sequence, blocks, start, end, plan_id)

    def victims_for(self, needed: int, candidates: list[Sequence]) -> int | None:
        """How many of the candidates, from the last one on, must be parked to free so many blocks.

        None: all of them together hold too few.
        """
        freed, shared = 0, dict[Block, int]()
        for count, candidate in enumerate(reversed(candidates)):
            if freed >= needed:
                return count
            for block in self._tables[candidate.request_id].blocks:
                if block.pins > 1:
                    shared[block] = shared.get(block, 0) + 1
                freed += block.pins == shared.get(block, 1)
        return len(candidates) if freed >= needed else None

    def park(self, sequence: Sequence, costs: Costs | None = None) -> None:
        """A resident sequence leaves the device. What is worth it is copied to the host."""
        table = self._tables[sequence.request_id]
        table.unpin()
        if self.policy.offloads:
            self._offload(sequence, table.blocks, costs)
        else:
            table.drop()
        if not table.blocks:
            del self._tables[sequence.request_id]

    def mirror(self, sequence: Sequence, most: int) -> int:
        """Copy up to so many full blocks of a resident sequence to the host early; how many that were.

        Only while no plan is being packed that it is part of.
        """
        return self._tables[sequence.request_id].mirror(most)

    # The end of sequences.

    def free(self, sequence: Sequence) -> None:
        """A request has left. The content of its full blocks stays for others until the slots are needed."""
        table = self._tables.pop(sequence.request_id, None)
        if table is not None:
            table.finish()

    def condemn(self, sequence: Sequence) -> list[int]:
        """What a sequence has computed is no good: no other will share it. Returns those that do now."""
        table = self._tables.get(sequence.request_id)
        if table is None:
            return []
        table.condemn()
        bad = set(table.blocks)
        others = [(request_id, other) for request_id, other in self._tables.items() if other is not table]
        return [request_id for request_id, other in others if not bad.isdisjoint(other.blocks)]

    def discard(self, sequence: Sequence) -> None:
        """Give up all KV of a sequence that goes on."""
        table = self._tables.pop(sequence.request_id, None)
        if table is not None:
            table.give_up()

    def plan_done(self, plan_id: int) -> None:
        """The results of all plans up to this one are in."""
        self._store.plan_done(plan_id)

    def acknowledge(self, copy_id: int) -> None:
        """Every rank has done all copies up to this one."""
        self._store.acknowledge(copy_id)

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """The copies begun since the last call, for the next plan."""
        return self._store.take_copies()

    # Inside.

    def _offload(self, sequence: Sequence, blocks: list[Block], costs: Costs | None) -> None:
        """Copy what is not on the host yet, unless computing it again is cheaper."""
        to_copy = [block for block in blocks if block.host < 0 and not block.pins]
        moved_s = len(to_copy) * self.copy_costs.to_host_s + len(blocks) * self.copy_costs.to_device_s
        if costs is None or moved_s <= costs.prefill_s(0, sequence.num_planned):
            self.counters.host_full += self._store.mirror(to_copy) < len(to_copy)

    def check(self) -> None:
        """Assert that every block is where it should be, and none is lost."""
        tables = self._tables.values()
        self._store.check(block for table in tables for block in table.blocks)
        self._cache.check()
        refs: dict[Block, int] = {}
        pins: dict[Block, int] = {}
        for table in tables:
            table.check()
            for block in table.blocks:
                refs[block] = refs.get(block, 0) + 1
                pins[block] = pins.get(block, 0) + table.is_pinned
        assert all((block.refs, block.pins) == (count, pins[block]) for block, count in refs.items())
