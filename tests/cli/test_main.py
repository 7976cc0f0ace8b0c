from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
from click.testing import Result

from fastserve_hpc import __version__, cli
from fastserve_hpc.client import Client
from fastserve_hpc.errors import BusyError, ConfigError, EndpointError

Run = Callable[..., Result]


def test_help_lists_every_command_with_examples_and_exit_codes(run: Run) -> None:
    result = run("--help")
    assert result.exit_code == 0
    for name in cli.COMMANDS:
        assert f"\n  {name} " in result.output
    assert "75 stopped early" in result.output
    assert 'fastserve-hpc submit "What is the capital of France?"' in result.output


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_teaches_by_example(run: Run, name: str) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0
    assert f"fastserve-hpc {name}" in result.output


@pytest.mark.parametrize("name", ["", "serve", "submit", "chat", "status", "stop", "bench", "doctor", "sbatch"])
def test_help_fits_into_80_columns(run: Run, name: str) -> None:
    lines = run(*name.split(), "--help").output.splitlines()
    assert [line for line in lines if len(line) > 80] == []


def test_version(run: Run) -> None:
    assert run("--version").output == f"fastserve-hpc, version {__version__}\n"


def test_an_unknown_command_is_a_usage_error(run: Run) -> None:
    result = run("srve")
    assert result.exit_code == 2
    assert "No such command 'srve'" in result.stderr


@pytest.mark.parametrize(
    ("error", "code"), [(EndpointError("no server"), 1), (ConfigError("bad"), 2), (BusyError("full"), 1)]
)
def test_an_error_is_one_line_and_its_exit_code(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    def fail(*_: object, **__: object) -> Client:
        raise error

    monkeypatch.setattr("fastserve_hpc.client.Client", fail)
    result = run("status")
    assert (result.exit_code, result.stderr, result.stdout) == (code, f"error: {error}\n", "")


def test_ctrl_c_is_said_in_one_word(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> Client:
        raise KeyboardInterrupt

    monkeypatch.setattr("fastserve_hpc.client.Client", interrupt)
    result = run("status")
    assert (result.exit_code, result.stderr) == (75, "interrupted\n")


def test_a_bug_shows_its_traceback() -> None:
    code = "import fastserve_hpc.client as c; c.Client = 1; from fastserve_hpc.cli import main; main(['status'])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "TypeError" in result.stderr


def test_module_and_help_start_at_once() -> None:
    """Help must not load what a server needs."""
    code = (
        "import sys; from fastserve_hpc.cli import main; main(['--help'], standalone_mode=False);"
        "print(sorted({'torch', 'numpy', 'mpi4py', 'zmq', 'asyncio', 'rich'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert result.stdout.splitlines()[-1] == "[]"
