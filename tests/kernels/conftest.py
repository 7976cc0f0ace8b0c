"""Kernels of every instruction set that this machine has; the library is built when it is missing or stale."""

from __future__ import annotations

import importlib.util
import multiprocessing
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from fastserve_kernels import KernelsUnavailableError, open_kernels
from fastserve_kernels.kernels import Kernels
from fastserve_kernels.library import INSTRUCTION_SETS, LIBRARY, source_hash
from fastserve_kernels.shared import create_segment

BUILD_SCRIPT = Path(__file__).parents[2] / "kernels" / "build.py"


@pytest.fixture(scope="session")
def builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernels_build", BUILD_SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def library(builder: ModuleType) -> Path:
    if not LIBRARY.exists() or source_hash().encode() not in LIBRARY.read_bytes():
        try:
            builder.build(LIBRARY)
        except builder.BuildError as error:
            pytest.skip(str(error))
    return LIBRARY


@pytest.fixture(scope="session")
def every_isa(library: Path) -> dict[str, Kernels]:
    found = {}
    for isa in INSTRUCTION_SETS:
        try:
            found[isa] = open_kernels(isa, num_threads=2)
        except KernelsUnavailableError as error:
            assert "this processor has no" in str(error)  # noqa: PT017
    return found


@pytest.fixture(params=INSTRUCTION_SETS)
def kernels(request: pytest.FixtureRequest, every_isa: dict[str, Kernels]) -> Kernels:
    if request.param not in every_isa:
        pytest.skip(f"this processor has no {request.param}")
    return every_isa[request.param]


def _rank(queue: Any, body: Callable[..., object], rank: int, num_ranks: int, path: Path, slot_bytes: int) -> None:
    torch.set_num_threads(1)  # a fork has none of its parent's OpenMP threads
    try:
        queue.put((rank, body(rank, num_ranks, path, slot_bytes)))
    except BaseException:
        queue.put((rank, RankError(traceback.format_exc())))


class RankError(Exception):
    """What a rank raised, as text."""


@pytest.fixture
def run_ranks(library: Path) -> Callable[..., list[object]]:
    """run(body, num_ranks, slot_bytes): body(rank, num_ranks, path, slot_bytes) in a process per rank -> results."""
    assert library.exists()

    def run(body: Callable[..., object], num_ranks: int, slot_bytes: int = 1 << 16) -> list[object]:
        context = multiprocessing.get_context("fork")
        queue, path = context.Queue(), create_segment(num_ranks, slot_bytes)
        arguments = [(queue, body, rank, num_ranks, path, slot_bytes) for rank in range(num_ranks)]
        processes = [context.Process(target=_rank, args=each, daemon=True) for each in arguments]
        try:
            for process in processes:
                process.start()
            results = dict(queue.get(timeout=60) for _ in processes)
        finally:
            for process in processes:
                process.kill()
            path.unlink()
        for result in results.values():
            if isinstance(result, RankError):
                raise result
        return [results[rank] for rank in range(num_ranks)]

    return run
