"""The layers that decoders are made of, each cut for tensor parallelism from the start.

A layer reads its rank's part of the weights when it is made, and computes with `Ops` and `TensorComm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fastserve_hpc.models.weights import Part, WeightReader
from fastserve_hpc.ops import Ops
from fastserve_hpc.parallel.comm import TensorComm


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's place among the tensor-parallel ranks, and the means to compute there."""

    rank: int
    size: int
    ops: Ops
    comm: TensorComm

    def part(self, count: int) -> range:
        """This rank's part of `count` things; parts differ by at most one."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def padded_part(self, count: int) -> tuple[range, int]:
        """This rank's part of `count` things, and the length that every rank's part is filled up to."""
        length = -(-count // self.size)
        start = min(self.rank * length, count)
        return range(start, min(start + length, count)), length

    def heads(self, count: int) -> range:
        """This rank's heads of `count`; ranks in excess of `count` share one with their neighbours."""
        if count >= self.size:
            return self.part(count)
        first = self.rank * count // self.size
        return range(first, first + 1)

    def sum(self, x: Tensor) -> Tensor:
        return self.comm.all_reduce(x) if self.size > 1 else x


class Linear:
    """x [T, in] -> [T, out]: a column-parallel layer holds some of the rows of one or more stored matrices."""

    def __init__(self, shard: Shard, weight: Any, bias: Tensor | None = None):
        self._ops = shard.ops
        self._weight = weight
        self._bias = bias

    @classmethod
    def columns(
        cls, reader: WeightReader, shard: Shard, outputs: Sequence[tuple[str, int, range]], num_inputs: int, bias: bool
    ) -> Linear:
        """Fused from (name, outputs in all, outputs of this rank) each; no communication."""
        weights = [Part.of(f"{name}.weight", (size, num_inputs), rows) for name, size, rows in outputs]
        biases = [Part.of(f"{name}.bias", (size,), rows) for name, size, rows in outputs]
        packed = shard.ops.pack_linear(reader.read(*weights))
        return cls(shard, packed, reader.read(*biases) if bias else None)

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.linear(x, self._weight, self._bias)


class RowParallelLinear:
    """x [T, this rank's inputs] -> [T, out], summed over the ranks; the bias is added once, after the sum."""

    def __init__(
        self, reader: WeightReader, shard: Shard, name: str, shape: tuple[int, int], inputs: range, bias: bool
    ):
        self._shard = shard
        self._weight = shard.ops.pack_linear(reader.read(Part.of(f"{name}.weight", shape, columns=inputs)))
        self._bias = reader.read(Part.of(f"{name}.bias", shape[:1])) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        if self._shard.size == 1:
            return self._shard.ops.linear(x, self._weight, self._bias)
        out = self._shard.sum(self._shard.ops.linear(x, self._weight))
        return out if self._bias is None else out + self._bias


class VocabEmbedding:
    """Token ids [T] -> [T, hidden]: each rank looks up the ids of its part of the vocabulary, the sum has all."""

    def __init__(self, reader: WeightReader, shard: Shard, name: str, vocab_size: int, hidden_size: int):
        self._shard = shard
        part, length = shard.padded_part(vocab_size)
        self._first = part.start
        self.weight = reader.read(Part.of(f"{name}.weight", (vocab_size, hidden_size), part), num_rows=length)

    def __call__(self, token_ids: Tensor) -> Tensor:
        if self._shard.size == 1:
            return self._shard.ops.embedding(token_ids, self.weight)
        local = token_ids - self._first
        foreign = (local < 0) | (local >= len(self.weight))
        found = self._shard.ops.embedding(local.masked_fill(foreign, 0), self.weight)
        return self._shard.sum(found.masked_fill_(foreign[:, None], 0))


class VocabHead:
    """x [R, hidden] -> logits [R, vocab], float32; the weight is cut and padded as `VocabEmbedding`'s."""

    def __init__(self, shard: Shard, weight: Tensor, vocab_size: int):
        self._shard = shard
        self._vocab_size = vocab_size
        self._weight = shard.ops.pack_linear(weight)

    def __call__(self, x: Tensor) -> Tensor:
        logits = self._shard.ops.linear(x, self._weight).float()
        if self._shard.size > 1:
            logits = self._shard.comm.all_gather(logits)[:, : self._vocab_size]
        return logits


class RMSNorm:
    """x [..., H] over its root mean square, times a weight."""

    def __init__(self, reader: WeightReader, shard: Shard, name: str, size: int, eps: float):
        self._ops = shard.ops
        self._weight = reader.read(Part.of(f"{name}.weight", (size,)))
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.rms_norm(x, self._weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(residual + x, the norm of that)."""
        return self._ops.add_rms_norm(x, residual, self._weight, self._eps)
