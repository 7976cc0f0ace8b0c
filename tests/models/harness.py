"""Drives models without a worker: tiny checkpoints, batches and caches by hand, ranks as threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastserve_hpc.models.decoder import Model
from fastserve_hpc.models.loader import load_model
from fastserve_hpc.models.locate import ModelFiles
from fastserve_hpc.models.spec import ModelSpec, load_spec
from fastserve_hpc.ops import Ops, reference
from fastserve_hpc.parallel.topology import Topology

TIMEOUT_S = 60


def write_llama(directory: Path, *, max_shard_size: str = "5GB", **changes: Any) -> Any:
    """Save a tiny random Llama as transformers does, and return transformers' model of it in float32.

    Sizes are odd on purpose; weights are large enough for logits of order 1.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "hidden_size": 72,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "num_hidden_layers": 3,
        "intermediate_size": 97,
        "vocab_size": 131,
        "max_position_embeddings": 256,
        "initializer_range": 0.15,
        "bos_token_id": None,
        "eos_token_id": None,
        **changes,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**settings)).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases start as ones and zeros, which would hide mistakes
            parameter.data += 0.3 * torch.randn(parameter.shape)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model


def oracle_logits(model: Any, ids: Sequence[int]) -> Tensor:
    """[len(ids), vocab]."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([list(ids)])).logits[0]
    return logits.float()


def oracle_choices(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
    """What greedy decoding chooses at each position of an answer: the answer itself, if that is greedy."""
    logits = oracle_logits(model, [*prompt, *answer])
    return logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist()


class ThreadComm:
    """`TensorComm` of one of several ranks that are threads of this process."""

    def __init__(self, topology: Topology, shared: _Shared):
        self._topology = topology
        self._shared = shared

    @property
    def shared(self) -> None:
        return None

    def _exchange(self, x: Tensor) -> list[Tensor]:
        """What every rank of the stage passed, in order."""
        slots, barrier = self._shared.stages[self._topology.stage]
        slots[self._topology.tp_rank] = x.clone()
        barrier.wait(TIMEOUT_S)
        ranks = list(slots)
        barrier.wait(TIMEOUT_S)
        return ranks

    def all_reduce(self, x: Tensor) -> Tensor:
        total = torch.stack([part.float() for part in self._exchange(x)]).sum(dim=0)
        return x.copy_(total)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._exchange(x), dim=-1)

    def gather(self, x: Tensor) -> Tensor:
        joined = self.all_gather(x)
        return joined if self._topology.tp_rank == 0 else x

    def send_next(self, x: Tensor) -> None:
        self._shared.links[self._topology.rank + self._topology.tp_size].put(x.clone())

    def recv_prev(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> Tensor:
        x = self._shared.links[self._topology.rank].get(timeout=TIMEOUT_S)
        assert (x.shape, x.dtype) == ((num_tokens, hidden_size), dtype)
        return x

    def progress(self) -> None:
        self._shared.num_progress_calls[self._topology.rank] += 1

    def set_progress_hook(self, hook: Any) -> None:  # noqa: ARG002
        raise AssertionError("models set no hook")

    def close(self) -> None:
        pass


class _Shared:
    def __init__(self, tp_size: int, num_stages: int):
        self.stages = [([torch.empty(0)] * tp_size, threading.Barrier(tp_size)) for _ in range(num_stages)]
        self.links: list[queue.Queue[Tensor]] = [queue.Queue() for _ in range(tp_size * num_stages)]
        self.num_progress_calls = [0] * (tp_size * num_stages)


@dataclass(frozen=True)
class TinyBatch:
    """What models and ops read of a batch."""

    token_ids: Tensor
    positions: Tensor
    slot_ids: Tensor
    query_start: Tensor
    query_lens: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    sample_rows: Tensor
    num_tokens: int
    takes_most_likely: bool = False


class TinyCache:
    """One rank's KV cache, filled with finite numbers that must not matter."""

    def __init__(self, num_blocks: int, spec: ModelSpec, topology: Topology, block_size: int, dtype: torch.dtype):
        kv_heads = max(1, spec.num_kv_heads // topology.tp_size)
        layers = len(topology.layer_range(spec.num_layers))
        self.tensor = torch.full((num_blocks, layers, 2, kv_heads, block_size, spec.head_dim), 7.5, dtype=dtype)

    @property
    def layers(self) -> Tensor:
        return self.tensor

    def layer(self, index: int) -> Tensor:
        return self.tensor[:, index]


Pieces = Sequence[tuple[int, int, Sequence[int]]]
"""(sequence, first position, token ids) each."""


class SequenceTables:
    """Sequences that have a fixed table of shuffled blocks."""

    def __init__(self, num_sequences: int, max_len: int, block_size: int):
        blocks = -(-max_len // block_size)
        self.block_size = block_size
        self.num_blocks = num_sequences * blocks
        order = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(3))
        self._tables = order.view(num_sequences, blocks)

    def batch(self, pieces: Pieces) -> TinyBatch:
        """All tokens of the pieces; every row is sampled."""
        size = self.block_size
        lens = [len(ids) for _, _, ids in pieces]
        positions = [torch.arange(start, start + len(ids)) for _, start, ids in pieces]
        slots = [
            self._tables[sequence, p // size] * size + p % size
            for (sequence, _, _), p in zip(pieces, positions, strict=True)
        ]
        return TinyBatch(
            token_ids=torch.tensor([i for _, _, ids in pieces for i in ids]),
            positions=torch.cat(positions),
            slot_ids=torch.cat(slots),
            query_start=torch.tensor([0, *accumulate(lens)], dtype=torch.int32),
            query_lens=torch.tensor(lens, dtype=torch.int32),
            seq_lens=torch.tensor([start + len(ids) for _, start, ids in pieces], dtype=torch.int32),
            block_tables=self._tables[[sequence for sequence, _, _ in pieces]].int(),
            sample_rows=torch.arange(sum(lens)),
            num_tokens=sum(lens),
        )


def run_stage(model: Model, topology: Topology, comm: Any, cache: TinyCache, batch: TinyBatch) -> Tensor:
    """One rank's part of a forward: hidden states, or logits on the last stage."""
    hidden = None
    if not topology.is_first_stage:
        hidden = comm.recv_prev(batch.num_tokens, model.hidden_size, model.dtype)
    out = model.forward(batch, cache, hidden)
    if not topology.is_last_stage:
        comm.send_next(out)
    return out


def generate(choose: Callable[[Pieces], list[int]], prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """`count` tokens after each prompt, all side by side; `choose` gives the token behind each row."""
    pieces: Pieces = [(i, 0, prompt) for i, prompt in enumerate(prompts)]
    answers: list[list[int]] = [[] for _ in prompts]
    for _ in range(count):
        behind = choose(pieces)
        chosen = [behind[end - 1] for end in accumulate(len(ids) for _, _, ids in pieces)]
        pieces = [(i, start + len(ids), [t]) for (i, start, ids), t in zip(pieces, chosen, strict=True)]
        for answer, token_id in zip(answers, chosen, strict=True):
            answer.append(token_id)
    return answers


class World:
    """All ranks of a model, each in a thread of its own."""

    def __init__(
        self,
        path: Path,
        tp_size: int = 1,
        num_stages: int = 1,
        dtype: torch.dtype = torch.float32,
        num_sequences: int = 8,
        max_len: int = 320,
        block_size: int = 16,
        ops: Ops = reference,
    ):
        self.spec = load_spec(path)
        self.ops = ops
        self.topologies = [Topology(rank, tp_size, num_stages) for rank in range(tp_size * num_stages)]
        self.shared = _Shared(tp_size, num_stages)
        self.comms = [ThreadComm(topology, self.shared) for topology in self.topologies]
        self.models: list[Model] = self._on_all_ranks(partial(self._load, ModelFiles(path, "tiny"), dtype))
        self.tables = SequenceTables(num_sequences, max_len, block_size)
        self.caches = [
            TinyCache(self.tables.num_blocks, self.spec, topology, block_size, dtype) for topology in self.topologies
        ]

    def forward(self, pieces: Pieces) -> Tensor:
        """Logits [T, vocab] of every token."""
        batch = self.tables.batch(pieces)
        first = self.topologies[0]
        logits: Tensor = self._on_all_ranks(partial(self._stage, batch))[first.result_rank]
        assert logits.dtype == torch.float32
        if first.tp_size > 1 and batch.num_tokens > len(pieces):  # of decodes the logits say enough
            tokens = self._on_all_ranks(partial(self._stage, replace(batch, takes_most_likely=True)))
            assert all(torch.equal(found, logits.argmax(dim=-1)) for found in tokens[-first.tp_size :])
        return logits

    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Greedy, all prompts side by side."""
        return generate(lambda pieces: self.forward(pieces).argmax(dim=-1).tolist(), prompts, count)

    def _load(self, files: ModelFiles, dtype: torch.dtype, rank: int) -> Model:
        return load_model(files, self.spec, self.topologies[rank], self.comms[rank], dtype, ops=self.ops)

    def _stage(self, batch: TinyBatch, rank: int) -> Tensor:
        return run_stage(self.models[rank], self.topologies[rank], self.comms[rank], self.caches[rank], batch)

    def _on_all_ranks(self, work: Any) -> list[Any]:
        """work(rank) of every rank, at once; the first exception is raised here."""
        results: list[Any] = [None] * len(self.topologies)
        errors: list[BaseException] = []

        def run(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        if errors:
            raise errors[0]
        assert not any(thread.is_alive() for thread in threads)
        return results
