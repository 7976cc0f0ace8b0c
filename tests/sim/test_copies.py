"""When simulated copies are done, and what memory pressure costs under each KV policy."""

from __future__ import annotations

from random import Random

import pytest

from fastserve_hpc.core.plan import BlockCopy
from fastserve_hpc.sim.copies import Link, SimulatedCopies
from fastserve_hpc.sim.engine import BLOCK_SIZE, EngineSettings, SimulatedEngine
from fastserve_hpc.sim.hardware import HARDWARE
from fastserve_hpc.sim.lengths import SHAREGPT
from fastserve_hpc.sim.shapes import SHAPES
from fastserve_hpc.sim.workload import Arrival, DrawnSource

LINK = Link(block_bytes=100.0, to_host=100.0, to_device=200.0, launch_s=0.25)


def test_the_two_ways_run_beside_each_other_and_are_done_in_order() -> None:
    copies = SimulatedCopies(LINK)
    copies.start([BlockCopy(1, 0, 0, False), BlockCopy(2, 9, 5, True), BlockCopy(3, 1, 1, False)], now=10.0)
    assert copies.uploaded_s(3) == 10.75
    assert [copies.done(now) for now in (10.0, 10.75, 12.24, 12.25)] == [0, 0, 0, 3]
    assert copies.next_s() is None


def test_neighbours_go_in_one_piece_where_that_is_asked_for() -> None:
    both = [BlockCopy(i, i, i + 4, False) for i in (1, 2)]
    for is_coalesced, end in ((True, 2.25), (False, 2.5)):
        copies = SimulatedCopies(Link(block_bytes=100.0, to_host=100.0, launch_s=0.25, is_coalesced=is_coalesced))
        copies.start(both, now=0.0)
        assert copies.done(end - 0.01) < 2
        assert copies.done(end) == 2


def workload() -> list[Arrival]:
    return DrawnSource(SHAREGPT).draw(80, 4.0, Random("memory"))


@pytest.mark.parametrize("kv_policy", ["proactive", "reactive", "recompute", "defer"])
def test_every_request_is_done_with_little_memory(kv_policy: str) -> None:
    hardware, shape = HARDWARE["a100-40g"], SHAPES["opt-13b"]
    settings = EngineSettings(
        costs=hardware.costs(shape),
        kv_tokens=5_000,
        max_batch=16,
        max_batch_tokens=2048,
        host_kv_tokens=50_000,
        link=hardware.link(shape, 1, BLOCK_SIZE),
    )
    engine = SimulatedEngine(settings, "skip-join", kv_policy)
    engine.run(workload())
    kv = engine.scheduler.kv
    assert len(engine.finished) == 80
    assert engine.scheduler.counters.preemptions > 0
    moves = kv_policy in ("proactive", "reactive")
    assert (kv.num_offloaded > 0) == (kv.num_uploaded > 0) == moves
    assert (engine.stall_s > 0) == (kv_policy == "reactive")
    assert (kv.counters.recomputed_tokens > 0) != moves
    kv.acknowledge(kv.num_offloaded + kv.num_uploaded)
    assert kv.num_used == kv.num_host_used == 0
