"""The layers that decoders are made of, each cut for tensor parallelism from the start.

A layer reads its rank's part of the weights when it is made, and computes with `Ops` and `TensorComm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastserve_hpc.models.weights import Part, StoredRows, WeightReader
from fastserve_hpc.ops import Activation, Norm, Ops
from fastserve_hpc.parallel.comm import TensorComm


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's place among the tensor-parallel ranks of its stage, and the means to compute there."""

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
        """This rank's heads of `count`; where there are more ranks than heads, neighbours share one."""
        if count >= self.size:
            return self.part(count)
        first = self.rank * count // self.size
        return range(first, first + 1)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of the ranks' tensors, in place."""
        return self.comm.all_reduce(x) if self.size > 1 else x


@dataclass(frozen=True, slots=True)
class Outputs:
    """Some of the outputs of the stored linear `name`, which has `total` of them."""

    name: str
    total: int
    rows: range


class ColumnParallelLinear:
    """x [T, in] -> [T, this rank's outputs] of one or several stored linears, fused; no communication."""

    def __init__(
        self,
        reader: WeightReader,
        shard: Shard,
        outputs: Sequence[Outputs],
        num_inputs: int,
        bias: bool,
        activation: Activation = "none",
    ):
        self._ops = shard.ops
        weight = reader.rows(*(Part.of(f"{o.name}.weight", (o.total, num_inputs), o.rows) for o in outputs))
        biases = reader.read(*(Part.of(f"{o.name}.bias", (o.total,), o.rows) for o in outputs)) if bias else None
        self.weight = shard.ops.pack_linear(weight, biases, activation)

    def __call__(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        return self._ops.linear(x, self.weight, norm=norm)


class RowParallelLinear:
    """residual + linear(x): x [T, this rank's inputs] -> [T, out], summed over the ranks.

    The first rank brings the bias and the residual into the sum. With `out_norm`, residual + out_norm(linear(x)):
    the sum is then taken, and normalised, in float32.
    """

    def __init__(
        self,
        reader: WeightReader,
        shard: Shard,
        name: str,
        shape: tuple[int, int],
        inputs: range,
        bias: bool,
        out_norm: Norm | None = None,
    ):
        self._shard = shard
        self.out_norm = out_norm
        weight = reader.rows(Part.of(f"{name}.weight", shape, columns=inputs))
        added = reader.read(Part.of(f"{name}.bias", shape[:1])) if bias else None
        self.weight = shard.ops.pack_linear(weight, added if shard.rank == 0 else None)

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        ops = self._shard.ops
        if self.out_norm is None:
            added = residual if self._shard.rank == 0 else None
            return self._shard.sum(ops.linear(x, self.weight, residual=added))
        total = self._shard.sum(ops.linear(x, self.weight, out_dtype=torch.float32))
        return (residual + ops.normalize(total, self.out_norm)).to(residual.dtype)


class VocabEmbedding:
    """Token ids [T] -> [T, width]: each rank looks up the ids of its part of the vocabulary, the sum has all.

    `weight`: this rank's rows of the matrix, as `vocabulary_rows` or, where the head has the same, `pack_linear` gives.
    `scale` multiplies them.
    """

    def __init__(self, shard: Shard, weight: Any, vocab_size: int, scale: float = 1.0):
        self._shard = shard
        self._first = shard.padded_part(vocab_size)[0].start
        self._weight = weight
        self._scale = scale

    def __call__(self, token_ids: Tensor) -> Tensor:
        if self._shard.size == 1:
            return self._shard.ops.embedding(token_ids, self._weight, self._scale)
        return self._shard.sum(self._shard.ops.embedding(token_ids, self._weight, self._scale, self._first))


class VocabHead:
    """From x [R, width] to what is said of the vocabulary, which is cut and padded as for the embedding.

    `weight`: this rank's rows of the matrix, packed. `softcap`: the bound of the logits, 0 for none.
    """

    def __init__(self, shard: Shard, weight: Any, vocab_size: int, softcap: float = 0.0):
        self._shard = shard
        self._vocab_size = vocab_size
        self._softcap = softcap
        self._part = shard.padded_part(vocab_size)[0]
        self._weight = weight

    def __call__(self, x: Tensor, norm: Norm | None) -> Tensor:
        """Logits [R, vocab] in float32 on tp_rank 0, this rank's part of them on the others."""
        if not len(x):  # the ranks agree on it, and spare each other the exchange
            return x.new_empty(0, self._vocab_size, dtype=torch.float32)
        logits = self._own_logits(x, norm)
        if self._shard.size == 1:
            return logits
        return self._shard.comm.gather(logits)[:, : self._vocab_size]

    def most_likely(self, x: Tensor, norm: Norm | None) -> Tensor:
        """[R] int64 on every rank: the id of the largest logit, of equals the lowest; -1 where they are not numbers."""
        own = self._own_logits(x, norm)
        if self._shard.size == 1:
            return self._shard.ops.most_likely(own)
        maxima, ids = self._own_maxima(own)
        joined = self._shard.comm.all_gather(torch.stack((maxima.view(torch.int32), ids.int()), dim=1))
        per_rank = joined.view(len(x), self._shard.size, 2)
        best = per_rank[:, :, 0].contiguous().view(torch.float32).argmax(dim=1, keepdim=True)  # ranks have ids in order
        chosen = per_rank[:, :, 1].gather(1, best)[:, 0].long()
        return chosen.masked_fill_((per_rank[:, :, 1] < 0).any(dim=1), -1)

    def _own_logits(self, x: Tensor, norm: Norm | None) -> Tensor:
        logits = self._shard.ops.linear(x, self._weight, norm=norm, out_dtype=torch.float32)
        return self._softcap * torch.tanh(logits / self._softcap) if self._softcap else logits

    def _own_maxima(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """The largest of this rank's logits in each row, and its id."""
        count = len(self._part)
        if not count:  # a small vocabulary is all with the ranks before
            return own.new_full((len(own),), -torch.inf), torch.zeros(len(own), dtype=torch.int64, device=own.device)
        places = self._shard.ops.most_likely(own[:, :count])
        maxima = own.gather(1, places.clamp(min=0)[:, None])[:, 0]
        return maxima, torch.where(places < 0, places, places + self._part.start)


def vocabulary_rows(reader: WeightReader, shard: Shard, name: str, shape: tuple[int, int]) -> StoredRows:
    """This rank's rows of a matrix [vocab, width], filled up with zeros to the same number on every rank."""
    part, length = shard.padded_part(shape[0])
    return reader.rows(Part.of(f"{name}.weight", shape, part), num_rows=length)


def read_norm(reader: WeightReader, name: str, size: int, eps: float, bias: bool = False) -> Norm:
    """A norm over `size` numbers, with a bias a layer norm; whole on every rank."""
    weight, added = (Part.of(f"{name}.{kind}", (size,)) for kind in ("weight", "bias"))
    return Norm(
        reader.read(weight, dtype=torch.float32) + reader.norm_offset,
        eps,
        reader.read(added, dtype=torch.float32) if bias else None,
    )
