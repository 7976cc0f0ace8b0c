"""The blocks of both tiers: who needs them, where their content lies, and the copies in between.

A slot is used again only when nothing of it is in flight: the last plan that may use it is done, and
every rank has acknowledged the last copy from or to it. Of what is not needed at once, the content
stays until somebody wants the slot.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from fastserve_hpc.core.block import NOWHERE, Block
from fastserve_hpc.core.block_pool import BlockPool
from fastserve_hpc.core.copy_book import CopyBook
from fastserve_hpc.core.plan import BlockCopy


class BlockStore:
    """Owns the slots of both tiers. Knows blocks and keys, not sequences."""

    def __init__(self, num_device: int, num_host: int):
        if num_device < 1:
            raise ValueError(f"a device tier of {num_device} blocks: at least 1 is needed")
        self._device = BlockPool(num_device)
        self._host = BlockPool(num_host)
        self.num_offloaded = 0
        """Blocks copied to the host since the start."""
        self.num_uploaded = 0
        """Likewise to the device."""
        self._index: dict[bytes, Block] = {}
        self._idle: OrderedDict[Block, None] = OrderedDict()
        """Device slots that can be taken: the content is in the host tier too, or only cached. Oldest first."""
        self._wanted: OrderedDict[Block, None] = OrderedDict()
        """Those that are taken last: a sequence that waits would have to compute the content again."""
        self._idle_host: OrderedDict[Block, None] = OrderedDict()
        """Host slots that can be taken: the content is on the device, too, or only cached."""
        self._settling: dict[Block, None] = {}
        """Device slots that will be idle or free once plans and copies in flight are done."""
        self._by_plan: dict[int, list[Block]] = {}
        self._copies = CopyBook()
        self._void: list[tuple[int, int]] = []
        """(copy, host slot): free once the copy is done."""
        self._last_done = 0

    @property
    def num_device(self) -> int:
        return self._device.num_slots

    @property
    def num_host(self) -> int:
        return self._host.num_slots

    @property
    def num_free(self) -> int:
        """Device slots that can be taken now."""
        return self._device.num_free + len(self._idle) + len(self._wanted)

    @property
    def num_free_host(self) -> int:
        return self._host.num_free + len(self._idle_host)

    @property
    def num_settling(self) -> int:
        """Device slots that can be taken once plans and copies in flight are done."""
        return len(self._settling)

    @property
    def copies_in_flight(self) -> int:
        return len(self._copies)

    @property
    def copies_done(self) -> int:
        """The highest n such that every rank has done copies 1..n."""
        return self._copies.done

    # What sequences do with blocks.

    def take(self, count: int) -> list[Block] | None:
        """New blocks, held and pinned by one sequence; None if there are not enough."""
        slots = self._take_slots(count)
        return None if slots is None else [Block(slot, refs=1, pins=1) for slot in slots]

    def hold(self, blocks: Iterable[Block]) -> None:
        """One more sequence has them as part of its KV."""
        for block in blocks:
            block.refs += 1
            self._file(block)

    def pin(self, blocks: Iterable[Block]) -> None:
        """A sequence that holds them may run. They are on the device."""
        for block in blocks:
            block.pins += 1
            self._file(block)

    def unpin(self, blocks: Sequence[Block], last_plan: int) -> None:
        """It no longer runs. Plan `last_plan` was the last to use them."""
        for block in reversed(blocks):  # of one sequence the last blocks are taken first
            block.pins -= 1
            if last_plan > block.last_plan:
                block.last_plan = last_plan
                if last_plan > self._last_done:
                    self._by_plan.setdefault(last_plan, []).append(block)
            self._file(block)

    def drop(self, blocks: Sequence[Block]) -> None:
        """A sequence, which does not run, lets go of them."""
        for block in reversed(blocks):
            block.refs -= 1
            self._file(block)

    def upload(self, blocks: Sequence[Block]) -> None:
        """Begin to bring blocks to the device, pinned, that are only on the host. There must be slots for them."""
        for block, slot in zip(blocks, self._take_slots(len(blocks)) or (), strict=True):
            block.device = slot
            block.pins += 1
            block.upload = self._copies.start(block, to_device=True)
            self._file(block)
        self.num_uploaded += len(blocks)

    def mirror(self, blocks: Iterable[Block], is_early: bool = False) -> int:
        """Begin to copy blocks, which no plan will change, to the host, as far as there is room; how many.

        An early mirror takes no other mirror's place.
        """
        count = 0
        for block in blocks:
            slot = self._take_host_slot(spares_mirrors=is_early)
            if slot is None:
                break
            block.host = slot
            self._copies.start(block, to_device=False)
            self._file(block)
            count += 1
        self.num_offloaded += count
        return count

    def spoil(self, block: Block) -> None:
        """The content on the device is about to change: the copy on the host is void."""
        if block.host < 0:
            return
        self._void.append((block.last_copy, block.host))
        block.host = NOWHERE
        self._free_void()
        self._file(block)

    # The prefix cache.

    def find(self, key: bytes) -> Block | None:
        """The block with this content."""
        return self._index.get(key)

    def name(self, block: Block, key: bytes, written: int) -> None:
        """The block has, or will have after plan `written`, the content that `key` names; others may share it."""
        block.written = written
        if key not in self._index:
            block.key = key
            self._index[key] = block

    def forget(self, block: Block) -> None:
        """Nobody else may share the block."""
        if block.key is not None:
            del self._index[block.key]
            block.key = None
            self._file(block)

    # What becomes done.

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """The copies begun since the last call, for the next plan."""
        return self._copies.take_new()

    def plan_done(self, plan_id: int) -> None:
        """The results of all plans up to this one are in."""
        self._last_done = plan_id
        for plan in [plan for plan in self._by_plan if plan <= plan_id]:
            for block in self._by_plan.pop(plan):
                self._file(block)

    def acknowledge(self, copy_id: int) -> None:
        """Every rank has done all copies up to this one."""
        for block in self._copies.acknowledge(copy_id):
            self._file(block)
        self._free_void()

    # Inside.

    def _file(self, block: Block) -> None:
        """Put the block where its state says."""
        self._settling.pop(block, None)
        self._idle.pop(block, None)
        self._wanted.pop(block, None)
        self._idle_host.pop(block, None)
        is_copied = block.last_copy <= self._copies.done
        if not block.refs and block.key is None and is_copied and block.last_plan <= self._last_done:
            self._free(block)
            return
        if block.device >= 0 and not block.pins:
            if not is_copied or block.last_plan > self._last_done:
                self._settling[block] = None
            elif block.refs and block.host < 0:
                self._wanted[block] = None
            else:
                self._idle[block] = None
        if block.host >= 0 and is_copied and (block.pins or not block.refs):
            self._idle_host[block] = None

    def _free(self, block: Block) -> None:
        if block.device >= 0:
            self._device.give_back((block.device,))
        if block.host >= 0:
            self._host.give_back((block.host,))
        block.device = block.host = NOWHERE

    def _take_slots(self, count: int) -> tuple[int, ...] | None:
        if count > self.num_free:
            return None
        while self._device.num_free < count:
            block, _ = (self._idle or self._wanted).popitem(last=False)
            self._device.give_back((block.device,))
            block.device = NOWHERE
            self._forget_if_lost(block)
        return self._device.take(count)

    def _take_host_slot(self, spares_mirrors: bool) -> int | None:
        if not self._host.num_free:
            block = next(iter(self._idle_host), None)
            if block is None or (block.refs and spares_mirrors):
                return None
            del self._idle_host[block]
            self._host.give_back((block.host,))
            block.host = NOWHERE
            self._forget_if_lost(block)
        slots = self._host.take(1)
        return None if slots is None else slots[0]

    def _forget_if_lost(self, block: Block) -> None:
        if block.is_lost and block.key is not None:
            del self._index[block.key]
            block.key = None

    def _free_void(self) -> None:
        if self._void:
            done = [slot for copy_id, slot in self._void if copy_id <= self._copies.done]
            self._void = [pair for pair in self._void if pair[0] > self._copies.done]
            self._host.give_back(done)

    def check(self, held: Iterable[Block]) -> None:
        """Assert the invariants; `held` are the blocks of all sequences."""
        self._device.check()
        self._host.check()
        known = {*held, *self._index.values(), *self._settling, *self._copies.blocks()}
        known |= {block for blocks in self._by_plan.values() for block in blocks}
        for slots, pool in (([b.device for b in known], self._device), ([b.host for b in known], self._host)):
            used = sorted(slot for slot in slots if slot >= 0)
            void = [slot for _, slot in self._void] if pool is self._host else []
            assert sorted(used + void) == sorted(pool._held), "a slot has two owners, or is lost"
        for block in known:
            self._check_block(block)
        assert all(self._index[block.key] is block for block in known if block.key is not None)
        assert all(block in known for places in (self._idle, self._wanted, self._idle_host) for block in places)

    def _check_block(self, block: Block) -> None:
        is_copied = block.last_copy <= self._copies.done
        is_quiet = is_copied and block.last_plan <= self._last_done
        assert 0 <= block.pins <= block.refs
        assert block.device >= 0 or not block.pins, "pinned, but not on the device"
        assert (
            block.device < 0
            or bool(block.pins) + sum(block in place for place in (self._settling, self._idle, self._wanted)) == 1
        )
        assert block.device >= 0 or block not in {**self._settling, **self._idle, **self._wanted}
        assert block not in self._idle or (is_quiet and (not block.refs or block.host >= 0))
        assert block not in self._wanted or (is_quiet and block.refs and block.host < 0)
        assert (block in self._idle_host) == (block.host >= 0 and is_copied and bool(block.pins or not block.refs))
        assert not block.is_lost or block.key is None
