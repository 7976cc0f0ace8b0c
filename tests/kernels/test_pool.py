"""The threads behind the kernels: they neither stall beside a busy neighbour nor burn a core when idle."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fastserve_kernels import open_kernels
from fastserve_kernels.kernels import Kernels


@pytest.fixture
def pooled(library: Path) -> Kernels:
    assert library.exists()
    return open_kernels(num_threads=3)


def make_call(kernels: Kernels, seed: int = 0) -> Callable[[], torch.Tensor]:
    torch.manual_seed(seed)
    packed = kernels.pack_linear(torch.randn(960, 576).bfloat16())
    x = torch.randn(5, 576).bfloat16()
    return lambda: kernels.linear(x, packed)


def test_idle_threads_sleep(pooled: Kernels) -> None:
    call = make_call(pooled)
    call()
    time.sleep(0.1)
    start = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - start < 0.05


def test_calls_from_several_python_threads(pooled: Kernels) -> None:
    calls = [make_call(pooled, seed) for seed in range(4)]
    expected = [call() for call in calls]
    wrong: list[int] = []

    def repeat(index: int) -> None:
        for _ in range(100):
            if not torch.equal(calls[index](), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=repeat, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_fork_works_without_the_threads(pooled: Kernels, run_ranks: Callable[..., list[Any]]) -> None:
    """Nobody has to come: the caller does all the work itself."""
    call = make_call(pooled)
    expected = call().float().tolist()

    def in_child(*_: Any) -> object:
        return call().float().tolist()

    assert run_ranks(in_child, 1) == [expected]


@pytest.mark.usefixtures("library")
def test_pools_come_and_go() -> None:
    before = threading.active_count(), len(os.listdir("/proc/self/task"))
    for _ in range(20):
        kernels = open_kernels(num_threads=4)
        make_call(kernels)()
        del kernels
    assert len(os.listdir("/proc/self/task")) <= before[1] + 1


def _spin() -> None:
    while True:
        pass


@pytest.fixture
def busy_neighbours() -> Iterator[None]:
    """A busy process for every core."""
    context = multiprocessing.get_context("fork")
    hogs = [context.Process(target=_spin, daemon=True) for _ in range(len(os.sched_getaffinity(0)))]
    for hog in hogs:
        hog.start()
    yield
    for hog in hogs:
        hog.kill()
        hog.join()


@pytest.mark.slow
@pytest.mark.usefixtures("busy_neighbours")
def test_busy_neighbours_do_not_stall_a_call(pooled: Kernels) -> None:
    """Threads that wait for each other lose a time slice of some 4 ms at every call; the best of several tries."""
    call = make_call(pooled)

    def mean() -> float:
        start = time.perf_counter()
        for _ in range(200):
            call()
        return (time.perf_counter() - start) / 200

    assert min(mean() for _ in range(8)) < 1e-3
