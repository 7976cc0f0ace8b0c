"""Small things to drive a worker with: a model whose logits are a function of what it reads from the KV cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from fastserve_hpc.core.plan import NewRequest, SequenceSlice
from fastserve_hpc.core.request import SamplingParams
from fastserve_hpc.ops import reference
from fastserve_hpc.parallel.topology import Topology
from fastserve_hpc.worker.batch import Batch
from fastserve_hpc.worker.kv_cache import KVCache, KVShape, KVSize
from fastserve_hpc.worker.memory_watch import MemoryWatch
from fastserve_hpc.worker.worker import Worker

VOCAB_SIZE = 61
BLOCK_SIZE = 4
MAX_MODEL_LEN = 64
SHAPE = KVShape(num_layers=1, num_kv_heads=1, block_size=BLOCK_SIZE, head_dim=2, dtype=torch.float32)
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=100)


class TinyModel:
    """Stores each token's id in its slot; a row's logits depend on every id that its block table leads to.

    So a wrong slot, table, length or order changes the answer. As a first stage of two it passes the ids on.
    """

    hidden_size = 2
    dtype = torch.float32

    def __init__(self, topology: Topology):
        self._topology = topology
        self._table = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))

    def forward(self, batch: Batch, kv: KVCache, hidden: torch.Tensor | None) -> torch.Tensor:
        ids = batch.token_ids.to(self.dtype)
        if not self._topology.is_first_stage:
            assert hidden is not None
            ids = hidden[:, 0]
        if not self._topology.is_last_stage:
            return torch.stack((ids, batch.positions.to(self.dtype)), dim=1)
        pages = kv.layer(0)
        pages[batch.slot_ids // BLOCK_SIZE, 0, 0, batch.slot_ids % BLOCK_SIZE, 0] = ids
        rows = [self._logits(batch, kv, row) for row in batch.sample_rows.tolist()]
        logits = torch.stack(rows) if rows else torch.zeros(0, VOCAB_SIZE)
        return reference.most_likely(logits) if batch.takes_most_likely else logits

    def _logits(self, batch: Batch, kv: KVCache, row: int) -> torch.Tensor:
        i = int(torch.searchsorted(batch.query_start, row, right=True)) - 1
        context = int(batch.seq_lens[i] - batch.query_lens[i]) + row - int(batch.query_start[i]) + 1
        assert context == int(batch.positions[row]) + 1
        pages = kv.layer(0)[batch.block_tables[i, : -(-int(batch.seq_lens[i]) // BLOCK_SIZE)].long()]
        stored = pages[:, 0, 0, :, 0].reshape(-1)
        ids = stored[:context]
        weights = torch.cos(torch.arange(context, dtype=torch.float32))
        spoilt = 0 * stored.sum()  # as in attention: NaN spreads, also from behind the end
        return (self._table[ids.nan_to_num().long()] * weights[:, None]).sum(dim=0) + spoilt


class Link:
    """Joins a first stage to a last one within one process."""

    def __init__(self) -> None:
        self._sent: deque[torch.Tensor] = deque()

    def send_next(self, x: torch.Tensor) -> None:
        self._sent.append(x.clone())

    def recv_prev(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
        x = self._sent.popleft()
        assert (tuple(x.shape), x.dtype) == ((num_tokens, hidden_size), dtype)
        return x


def make_worker(
    topology: Topology | None = None,
    link: Link | None = None,
    device_blocks: int = 32,
    host_blocks: int = 32,
    max_tokens: int = 64,
    max_seqs: int = 8,
) -> Worker:
    """A worker whose blocks all had owners who left what is no number in them."""
    topology = topology or Topology()
    kv = KVCache(SHAPE, KVSize(device_blocks, host_blocks), torch.device("cpu"))
    kv.device_tier.fill_(torch.nan)
    kv.host_tier.fill_(torch.nan)
    return Worker(
        TinyModel(topology),
        kv,
        topology,
        link or Link(),
        MemoryWatch(lambda: 12345),
        max_tokens=max_tokens,
        max_seqs=max_seqs,
        max_model_len=MAX_MODEL_LEN,
    )


def new_request(request_id: int, prompt: Sequence[int], sampling: SamplingParams = GREEDY) -> NewRequest:
    return NewRequest(request_id, tuple(prompt), sampling, choice=0)


class Slots:
    """Hands out block slots as a coordinator would, and makes the slices that go with them."""

    def __init__(self, slots: Sequence[int], block_size: int = BLOCK_SIZE):
        self._free = deque(slots)
        self._block_size = block_size
        self.held: dict[int, list[int]] = {}

    def slice(
        self, request_id: int, start: int, num_tokens: int, token_ids: Sequence[int] = (), samples: bool = False
    ) -> SequenceSlice:
        table = self.held.setdefault(request_id, [])
        num_kept = len(table)
        while len(table) * self._block_size < start + num_tokens:
            table.append(self._free.popleft())
        new = tuple(table[num_kept:])
        return SequenceSlice(request_id, start, num_tokens, num_kept, new, tuple(token_ids), samples)

    def release(self, request_id: int) -> None:
        self._free.extend(self.held.pop(request_id))
