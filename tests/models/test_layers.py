"""How things are shared out among tensor-parallel ranks."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fastserve_hpc.models.layers import Shard
from fastserve_hpc.ops import reference
from fastserve_hpc.parallel.single import SingleComm

RANKS = st.integers(1, 12)


def shards(size: int) -> list[Shard]:
    return [Shard(rank, size, reference, SingleComm()) for rank in range(size)]


@given(count=st.integers(0, 200), size=RANKS)
def test_parts_are_even_and_join_up(count: int, size: int) -> None:
    parts = [shard.part(count) for shard in shards(size)]
    assert [i for part in parts for i in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(count=st.integers(0, 200), size=RANKS)
def test_padded_parts_join_up_with_all_padding_at_the_end(count: int, size: int) -> None:
    parts = [shard.padded_part(count) for shard in shards(size)]
    rows = [row for part, length in parts for row in [*part, *[None] * (length - len(part))]]
    assert rows[:count] == list(range(count))
    assert set(rows[count:]) <= {None}
    assert len({length for _, length in parts}) == 1


@pytest.mark.parametrize(
    ("count", "size", "heads"),
    [
        (8, 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (3, 3, [[0], [1], [2]]),
        (2, 6, [[0], [0], [0], [1], [1], [1]]),
        (1, 4, [[0], [0], [0], [0]]),
    ],
)
def test_heads_are_shared_by_neighbours_where_there_are_too_few(count: int, size: int, heads: list[list[int]]) -> None:
    assert [list(shard.heads(count)) for shard in shards(size)] == heads


@given(kv_heads=st.integers(1, 8), group=st.integers(1, 8), size=RANKS)
def test_query_heads_meet_their_kv_heads(kv_heads: int, group: int, size: int) -> None:
    """Local query head i must read local KV head i // (local queries per local KV head)."""
    heads = kv_heads * group
    assume(heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0))
    for shard in shards(size):
        queries, keys = shard.heads(heads), shard.heads(kv_heads)
        local_group = len(queries) // len(keys)
        assert [keys[i // local_group] for i in range(len(queries))] == [q // group for q in queries]
