from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from fastserve_kernels import open_kernels, reference
from fastserve_kernels.attention import supports_cache
from fastserve_kernels.kernels import Kernels
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int = 16
    window: int = 0
    softcap: float = 0.0

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


SHAPES = [
    Shape(9, 3, 64),
    Shape(4, 4, 16),
    Shape(7, 1, 80, block_size=32),
    Shape(8, 1, 128),
    Shape(2, 1, 256, window=19),
    Shape(4, 2, 96, softcap=5.0),
    Shape(6, 2, 48, block_size=48, window=100, softcap=30.0),
]


class Sequence:
    """The tokens of one sequence with their blocks in a shared cache."""

    def __init__(self, shape: Shape, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def tokens(heads: int) -> Tensor:
            return torch.randn(length, heads * shape.head_dim, generator=generator).bfloat16()

        self.q, self.k, self.v = tokens(shape.heads), tokens(shape.kv_heads), tokens(shape.kv_heads)
        self.length = length
        self.blocks: list[int] = []


class Cache:
    """A poisoned cache: what was never written is NaN, as an earlier owner may have left it."""

    def __init__(self, shape: Shape, lengths: list[int]) -> None:
        self.shape = shape
        self.sequences = [Sequence(shape, length, seed) for seed, length in enumerate(lengths)]
        counts = [-(-length // shape.block_size) for length in lengths]
        order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(7)).tolist()
        whole = torch.full((len(order), 2, 2, shape.kv_heads, shape.block_size, shape.head_dim), float("nan"))
        self.kv = whole.bfloat16()[:, 1]  # the view of layer 1 of 2
        for sequence, count in zip(self.sequences, counts, strict=True):
            sequence.blocks = [order.pop() for _ in range(count)]

    def slots(self, sequence: Sequence) -> Tensor:
        size = self.shape.block_size
        return torch.tensor([sequence.blocks[i // size] * size + i % size for i in range(sequence.length)])

    def store(self, kernels: Kernels, sequence: Sequence, start: int, end: int) -> None:
        rows = slice(start, end)
        q = sequence.q[rows].clone()
        slots = self.slots(sequence)[rows]
        kernels.rope_store(q, sequence.k[rows], sequence.v[rows], self.kv, torch.arange(start, end), slots)

    def attend(self, kernels: Kernels, pieces: list[tuple[Sequence, int, int]]) -> list[Tensor]:
        """One call over pieces (sequence, start, end) of several sequences."""
        width = max(len(sequence.blocks) for sequence, _, _ in pieces)
        tables = torch.tensor([s.blocks + [0] * (width - len(s.blocks)) for s, _, _ in pieces], dtype=torch.int32)
        lengths = [end - start for _, start, end in pieces]
        query_start = torch.tensor([0, *lengths]).cumsum(0).int()
        q = torch.cat([s.q[start:end] for s, start, end in pieces])
        out = kernels.paged_attention(
            q,
            self.kv,
            tables,
            query_start,
            torch.tensor([end for _, _, end in pieces], dtype=torch.int32),
            scale=self.shape.scale,
            window=self.shape.window,
            softcap=self.shape.softcap,
        )
        return list(torch.split(out, lengths))

    def expected(self, sequence: Sequence) -> Tensor:
        dim = self.shape.head_dim
        q, k, v = (x.view(sequence.length, -1, dim) for x in (sequence.q, sequence.k, sequence.v))
        y = reference.attention(q, k, v, 0, self.shape.scale, self.shape.window, self.shape.softcap)
        return y.reshape(sequence.length, -1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_reference(kernels: Kernels, shape: Shape) -> None:
    cache = Cache(shape, [1, 19, 99, 64, 200])
    for sequence in cache.sequences:
        cache.store(kernels, sequence, 0, sequence.length)
    outputs = cache.attend(kernels, [(s, 0, s.length) for s in cache.sequences])
    for sequence, out in zip(cache.sequences, outputs, strict=True):
        torch.testing.assert_close(out.float(), cache.expected(sequence), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_and_neighbours_change_no_bit(kernels: Kernels, shape: Shape) -> None:
    whole = Cache(shape, [333, 40, 131])
    for sequence in whole.sequences:
        whole.store(kernels, sequence, 0, sequence.length)
    outputs = whole.attend(kernels, [(s, 0, s.length) for s in whole.sequences])

    chunked = Cache(shape, [333, 40, 131])
    pieces: list[list[Tensor]] = [[], [], []]
    starts = [0, 0, 0]
    sizes = [7, 1, 64, 3, 130, 16, 2, 5, 33, 1]
    for turn in range(200):
        batch = []
        for i, sequence in enumerate(chunked.sequences):
            end = min(sequence.length, starts[i] + sizes[(turn + 3 * i) % len(sizes)])
            if (turn + i) % 3 != 0 and end > starts[i]:
                chunked.store(kernels, sequence, starts[i], end)
                batch.append((i, starts[i], end))
                starts[i] = end
        if not batch:
            continue
        for (i, _, _), out in zip(
            batch, chunked.attend(kernels, [(chunked.sequences[i], a, b) for i, a, b in batch]), strict=True
        ):
            pieces[i].append(out)
    assert starts == [333, 40, 131]
    for i, out in enumerate(outputs):
        assert torch.equal(torch.cat(pieces[i]), out)


def test_instruction_sets_with_one_order_give_the_same_bits(every_isa: dict[str, Kernels]) -> None:
    results: dict[str, Tensor] = {}
    for kernels in every_isa.values():
        cache = Cache(SHAPES[0], [150])
        cache.store(kernels, cache.sequences[0], 0, 150)
        (out,) = cache.attend(kernels, [(cache.sequences[0], 0, 150)])
        assert torch.equal(results.setdefault(kernels.dot_order, out), out), kernels.isa


@pytest.mark.parametrize("threads", [1, 5])
def test_the_number_of_threads_changes_no_bit(kernels: Kernels, threads: int) -> None:
    cache = Cache(SHAPES[0], [300, 17])
    for sequence in cache.sequences:
        cache.store(kernels, sequence, 0, sequence.length)
    pieces = [(s, 0, s.length) for s in cache.sequences]
    others = cache.attend(open_kernels(kernels.isa, num_threads=threads), pieces)
    for ours, theirs in zip(cache.attend(kernels, pieces), others, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pages_have_the_documented_layout(kernels: Kernels, shape: Shape) -> None:
    cache = Cache(shape, [shape.block_size])
    (sequence,) = cache.sequences
    cache.store(kernels, sequence, 0, sequence.length)
    block = cache.kv[sequence.blocks[0]]
    k, v = reference.unpack_kv(block[0], block[1])
    plain = (sequence.length, shape.kv_heads, shape.head_dim)
    assert torch.equal(k, sequence.k.view(plain).transpose(0, 1))
    assert torch.equal(v, sequence.v.view(plain).transpose(0, 1))
    repacked = reference.pack_kv(k, v)
    assert torch.equal(repacked[0], block[0])
    assert torch.equal(repacked[1], block[1])


@pytest.mark.parametrize("head_dim", [16, 64, 80, 256])
@pytest.mark.parametrize("norms", [False, True])
def test_rope_store(kernels: Kernels, head_dim: int, norms: bool) -> None:
    shape = Shape(4, 2, head_dim)
    cache = Cache(shape, [99])
    (sequence,) = cache.sequences
    angles = torch.rand(200, head_dim // 2) * 6
    cos, sin = angles.cos(), angles.sin()
    q_norm, k_norm = (torch.rand(head_dim), torch.rand(head_dim)) if norms else (None, None)
    positions = torch.arange(50, 149)
    q = sequence.q.clone()
    kernels.rope_store(
        q, sequence.k, sequence.v, cache.kv, positions, cache.slots(sequence),
        cos=cos, sin=sin, q_norm=q_norm, k_norm=k_norm, norm_eps=1e-6,
    )  # fmt: skip

    def expected(x: Tensor, norm: Tensor | None) -> Tensor:
        x = x.view(99, -1, head_dim)
        x = x if norm is None else reference.rms_norm(x, norm, 1e-6)
        return reference.rope(x, cos[positions], sin[positions])

    torch.testing.assert_close(q.view(99, -1, head_dim).float(), expected(sequence.q, q_norm), rtol=0.01, atol=0.02)
    blocks = cache.kv[sequence.blocks]
    k, v = reference.unpack_kv(blocks[:, 0], blocks[:, 1])
    stored_k, stored_v = (x.transpose(1, 2).reshape(-1, 2, head_dim)[:99] for x in (k, v))
    torch.testing.assert_close(stored_k.float(), expected(sequence.k, k_norm), rtol=0.01, atol=0.02)
    assert torch.equal(stored_v, sequence.v.view(99, 2, head_dim))


def test_offsets_beyond_two_to_the_31_elements(kernels: Kernels) -> None:
    """A cache of 4.5 GB of address space, of which one block at the end is touched."""
    shape = Shape(9, 3, 64)
    cache = Cache(shape, [16])
    (sequence,) = cache.sequences
    block_elements = 2 * 3 * 16 * 64
    num_blocks = 2**31 // block_elements + 40_000
    memory = torch.empty(num_blocks * block_elements, dtype=torch.bfloat16)
    small = cache.kv
    cache.kv = memory.view(num_blocks, 2, 3, 16, 64)
    sequence.blocks = [num_blocks - 1]
    cache.store(kernels, sequence, 0, 16)
    (out,) = cache.attend(kernels, [(sequence, 0, 16)])
    cache.kv, sequence.blocks = small, [0]
    cache.store(kernels, sequence, 0, 16)
    assert torch.equal(out, cache.attend(kernels, [(sequence, 0, 16)])[0])


def test_wrong_arguments_are_refused(kernels: Kernels) -> None:
    assert supports_cache(16, 64)
    assert not supports_cache(8, 64)
    assert not supports_cache(16, 40)
    cache = Cache(SHAPES[0], [16])
    lengths = torch.tensor([16], dtype=torch.int32)
    table, start = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 16], dtype=torch.int32)
    q = cache.sequences[0].q
    with pytest.raises(ValueError, match="multiples of 16"):
        kernels.paged_attention(q, cache.kv[..., :8, :], table, start, lengths, scale=1.0)
    with pytest.raises(ValueError, match="int32"):
        kernels.paged_attention(q, cache.kv, table.long(), start, lengths, scale=1.0)
    with pytest.raises(ValueError, match="multiple of the KV heads"):
        kernels.paged_attention(q[:, :128], cache.kv, table, start, lengths, scale=1.0)
