from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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


@pytest.mark.parametrize("name", ["", *cli.COMMANDS, "sbatch serve", "sbatch batch"])
def test_help_fits_into_80_columns(run: Run, name: str) -> None:
    lines = run(*name.split(), "--help").output.splitlines()
    assert [line for line in lines if len(line) > 80] == []


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_what_takes_the_endpoint_of_a_server_takes_its_job_too(run: Run, name: str) -> None:
    text = run(name, "--help").output
    is_client = "--endpoint NAME" in text
    assert is_client == (name in ("submit", "chat", "status", "connect", "stop", "bench", "batch", "score"))
    assert is_client == ("--job ID" in text)


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


def test_a_full_disk_and_a_missing_directory_are_one_line(run: Run, tmp_path: Path) -> None:
    result = run("submit", "hi", "--stats", str(tmp_path / "gone" / "stats"))
    assert (result.exit_code, result.stderr) == (1, f"error: {tmp_path}/gone/stats: No such file or directory\n")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fastserve_hpc", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=30,
        )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_closed_standard_streams_are_nothing_and_stay_so(closed: str) -> None:
    """The next file would get the number of a closed stream, and what is printed."""
    code = (
        "import os, subprocess, sys; from fastserve_hpc.cli import prepare_streams; prepare_streams();"
        "assert os.open('/dev/null', os.O_RDONLY) > 2; assert None not in (sys.stdin, sys.stdout, sys.stderr);"
        "print('x', flush=True); print('y', file=sys.stderr, flush=True); sys.stdin.isatty();"
        "sys.exit(subprocess.run(['sh', '-c', 'test -e /proc/self/fd/0 -a -e /proc/self/fd/1']).returncode)"
    )
    command = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code]
    assert subprocess.run(command, timeout=30, check=False).returncode == 0


def test_what_a_terminal_cannot_show_is_escaped_and_what_is_no_text_comes_in_as_such() -> None:
    code = (
        "import sys; from fastserve_hpc.cli import prepare_streams; prepare_streams();"
        "print('\\u00e9', ascii(sys.stdin.read()))"
    )
    environ = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, input=b"a\xff", capture_output=True, timeout=30, check=True, env=environ)
    assert done.stdout == b"\\xe9 'a\\udcff'\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("bench", "--trace", "FILE", "--rate", "nan"),
        ("bench", "--trace", "FILE", "--rate", "inf"),
        ("bench", "--trace", "FILE", "--scale-lengths", "inf"),
        ("bench", "--trace", "FILE", "--scale-lengths", "nan"),
        ("stop", "--wait", "nan"),
        ("simulate", "--scale-outputs", "nan"),
    ],
)
def test_numbers_that_no_clock_knows_are_refused(run: Run, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    trace = tmp_path / "trace"
    trace.write_text('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}\n')
    result = run(*(str(trace) if argument == "FILE" else argument for argument in arguments))
    assert result.exit_code == 2
    assert "is not a finite number" in result.stderr


def test_module_and_help_start_at_once() -> None:
    """Help must not load what a server needs."""
    code = (
        "import sys; from fastserve_hpc.cli import main; main(['--help'], standalone_mode=False);"
        "print(sorted({'torch', 'numpy', 'mpi4py', 'zmq', 'asyncio', 'rich'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert result.stdout.splitlines()[-1] == "[]"
