"""What importing a part of the package loads, and how long it takes. Contracts between parts are import-linter's."""

from __future__ import annotations

import subprocess
import sys

import pytest

MAX_CLIENT_IMPORT_S = 0.3


def loaded_modules(statement: str) -> set[str]:
    """Top-level names of all modules that a fresh interpreter has after the statement."""
    code = f"{statement}; import sys; print(' '.join({{name.partition('.')[0] for name in sys.modules}}))"
    return set(python(code).split())


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.parametrize(
    "module",
    ["fastserve_hpc.client", "fastserve_hpc.protocol", "fastserve_hpc.endpoint", "fastserve_hpc.openai.bodies"],
)
def test_client_code_loads_no_engine(module: str) -> None:
    assert not loaded_modules(f"import {module}") & {"torch", "numpy", "mpi4py", "transformers", "click", "rich"}


def test_the_client_is_there_at_once() -> None:
    code = "import time; t = time.process_time(); import fastserve_hpc.client; print(time.process_time() - t)"
    assert min(float(python(code)) for _ in range(5)) < MAX_CLIENT_IMPORT_S


@pytest.mark.parametrize("module", ["scheduler", "kv_manager", "request", "plan"])
def test_the_core_is_a_function_of_its_inputs(module: str) -> None:
    forbidden = {"torch", "numpy", "mpi4py", "zmq", "msgspec", "asyncio"}
    assert not loaded_modules(f"import fastserve_hpc.core.{module}") & forbidden


@pytest.mark.parametrize("command", ["serve", "batch", "submit", "chat", "status", "stop", "bench"])
def test_a_command_file_is_light(command: str) -> None:
    heavy = {"torch", "numpy", "mpi4py", "zmq", "msgspec", "asyncio", "rich"}
    assert not loaded_modules(f"import fastserve_hpc.cli.{command}") & heavy
