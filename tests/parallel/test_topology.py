"""Ranks, stages and layers."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve_hpc.errors import ConfigError
from fastserve_hpc.parallel.topology import Topology


def world(tp_size, num_stages):
    return [Topology(rank, tp_size, num_stages) for rank in range(tp_size * num_stages)]


def test_a_rank_knows_its_place():
    t = Topology(rank=5, tp_size=2, num_stages=4)
    assert (t.stage, t.tp_rank, t.world_size) == (2, 1, 8)
    assert (t.previous_rank, t.next_rank) == (3, 7)
    assert list(t.stage_ranks) == [4, 5]
    assert not t.is_first_stage
    assert not t.is_last_stage


def test_the_default_is_one_rank_that_is_everything():
    t = Topology()
    assert t.is_first_stage
    assert t.is_last_stage
    assert t.is_coordinator
    assert t.reports_results
    assert t.previous_rank is None
    assert t.next_rank is None
    assert t.layer_range(30) == range(30)


@given(st.integers(1, 8), st.integers(1, 8))
def test_links_are_mutual_and_one_rank_reports(tp_size, num_stages):
    ranks = world(tp_size, num_stages)
    for t in ranks:
        assert t.rank == t.stage * tp_size + t.tp_rank
        if t.next_rank is not None:
            after = ranks[t.next_rank]
            assert (after.previous_rank, after.tp_rank, after.stage) == (t.rank, t.tp_rank, t.stage + 1)
    assert [t.rank for t in ranks if t.reports_results] == [ranks[0].result_rank]
    assert ranks[ranks[0].result_rank].is_last_stage


@given(st.integers(1, 16), st.integers(0, 100))
def test_layers_are_split_without_gaps_and_evenly(num_stages, more_layers):
    num_layers = num_stages + more_layers
    ranges = [t.layer_range(num_layers) for t in world(1, num_stages)]
    assert [layer for r in ranges for layer in r] == list(range(num_layers))
    sizes = [len(r) for r in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "sizes"),
    [(30, 2, [15, 15]), (31, 2, [16, 15]), (30, 4, [7, 8, 8, 7]), (29, 4, [7, 8, 7, 7]), (31, 4, [8, 8, 8, 7])],
)
def test_left_over_layers_go_to_the_middle(num_layers, num_stages, sizes):
    assert [len(t.layer_range(num_layers)) for t in world(1, num_stages)] == sizes


def test_more_stages_than_layers_are_refused_with_the_cure():
    with pytest.raises(ConfigError, match="use --pp 3 or less"):
        Topology(0, 1, 4).layer_range(3)


@pytest.mark.parametrize(("rank", "tp_size", "num_stages"), [(2, 2, 1), (-1, 1, 1), (0, 0, 1), (0, 1, 0)])
def test_contradictions_are_refused(rank, tp_size, num_stages):
    with pytest.raises(ValueError, match=r"outside|at least 1"):
        Topology(rank, tp_size, num_stages)


def test_it_is_pure():
    code = "import sys, fastserve_hpc.parallel.topology; sys.exit(bool({'torch','mpi4py','numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
