"""Full blocks by their content: what one request has computed, others take over."""

from __future__ import annotations

from fastserve_hpc.core.block import NOT_YET, Block
from fastserve_hpc.core.block_keys import KeyChain
from fastserve_hpc.core.block_store import BlockStore
from fastserve_hpc.core.sequence import Sequence


class PrefixCache:
    """Names blocks and finds them. `salt` None: names none, finds none."""

    def __init__(self, store: BlockStore, block_size: int, salt: bytes | None):
        self._store = store
        self._block_size = block_size
        self._salt = salt
        self._writers: dict[bytes, Sequence] = {}
        """Who will compute the content that a key names."""

    def match(self, sequence: Sequence, first: int, plan_id: int, uploads: bool) -> tuple[list[Block], bool]:
        """The blocks that the sequence's prompt goes on with from block `first`, as far as they are there.

        And whether it should wait for the next one: a sequence of this plan computes it. At least the last
        known token is left to be computed. Without `uploads` blocks that are only on the host do not count.
        """
        chain = self._chain(sequence)
        if chain is None:
            return [], False
        found: list[Block] = []
        for key in chain.keys[first : _num_sharable(sequence) // self._block_size]:
            block = self._store.find(key)
            if block is None or (block.device < 0 and not uploads):
                break
            if block.written >= plan_id:
                writer = self._writers.get(key)
                return found, block.written == plan_id or (writer is not None and writer.last_plan_id == plan_id)
            found.append(block)
        return found, False

    def announce(self, sequence: Sequence, blocks: list[Block], first: int) -> None:
        """The sequence will compute its prompt's full blocks from `first` on."""
        if sequence.keys is None:
            return
        for key, block in zip(sequence.keys.keys[first:], blocks[first:], strict=False):
            self._store.name(block, key, NOT_YET)
            if block.key is not None:
                self._writers[key] = sequence

    def note_written(self, sequence: Sequence, blocks: list[Block], start: int, end: int, plan_id: int) -> None:
        """Plan `plan_id` computes positions [start, end): later plans may share the blocks that it fills."""
        if sequence.keys is None:
            return
        keys = sequence.keys.keys
        for i in range(start // self._block_size, min(end // self._block_size, len(keys))):
            blocks[i].written = plan_id
            if blocks[i].key is not None:
                self._writers.pop(keys[i], None)

    def withdraw(self, sequence: Sequence, blocks: list[Block]) -> None:
        """What the sequence has announced and not computed it will not compute now."""
        if sequence.keys is None:
            return
        first, end = sequence.num_planned // self._block_size, len(sequence.keys.keys)
        for block in blocks[first:end]:
            if block.key is not None and block.written == NOT_YET:
                del self._writers[block.key]
                self._store.forget(block)

    def add_outputs(self, sequence: Sequence, blocks: list[Block]) -> None:
        """A sequence ends: the full blocks of its answer join, a chat may go on with them."""
        chain = sequence.keys
        num_full = min(sequence.num_planned // self._block_size, len(blocks))
        if chain is None or num_full <= len(chain.keys):
            return
        first = len(chain.keys)
        tokens = (*sequence.request.prompt, *sequence.outputs)
        chain.extend(tokens[first * self._block_size : num_full * self._block_size])
        for key, block in zip(chain.keys[first:], blocks[first:num_full], strict=True):
            self._store.name(block, key, sequence.last_plan_id)

    def _chain(self, sequence: Sequence) -> KeyChain | None:
        if sequence.keys is None and self._salt is not None and sequence.request.sampling.cache_prefix:
            sequence.keys = KeyChain(self._block_size, self._salt)
            sequence.keys.extend(sequence.request.prompt)
        return sequence.keys

    def check(self) -> None:
        """Assert that whoever is to compute a block is known by its key alone."""
        for key, writer in self._writers.items():
            block = self._store.find(key)
            assert block is not None
            assert block.written == NOT_YET
            assert writer.keys is not None
            assert key in writer.keys.keys


def _num_sharable(sequence: Sequence) -> int:
    """Positions that need not be computed: all but the last known token, and nothing that is to be scored."""
    sampling = sequence.request.sampling
    if sampling.prompt_logprobs is not None and not sequence.outputs:
        return min(sampling.prompt_logprobs_from, sequence.num_tokens - 1)
    return sequence.num_tokens - 1
