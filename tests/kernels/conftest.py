"""Kernels of every instruction set that this machine has; the library is built when it is missing or stale."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from fastserve_kernels import KernelsUnavailableError, open_kernels
from fastserve_kernels.kernels import Kernels
from fastserve_kernels.library import INSTRUCTION_SETS, LIBRARY, source_hash

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
def every_isa(library: Path) -> dict[str, Kernels]:  # noqa: ARG001
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
