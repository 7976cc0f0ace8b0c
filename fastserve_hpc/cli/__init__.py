"""The command line. One file a command, loaded only when it is asked for.

A command returns an `ExitCode` (None is `DONE`). A `FastServeError` ends it with one line on
standard error and the error's exit code, and so does a disk that is full or a file that cannot be
opened; anything else is a bug and shows its traceback.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from typing import Any

import click

from fastserve_hpc import __version__
from fastserve_hpc.errors import ExitCode, FastServeError

COMMANDS = (
    "serve",
    "batch",
    "score",
    "submit",
    "chat",
    "status",
    "connect",
    "stop",
    "bench",
    "doctor",
    "sbatch",
    "simulate",
)

_EPILOG = """\b
Start a server on two ranks, ask it, score a file on it, end it:
  mpiexec -n 2 fastserve-hpc serve --model smollm2-135m --pp 2 &
  fastserve-hpc submit "What is the capital of France?"
  fastserve-hpc batch --endpoint default --input in.jsonl --output out.jsonl
  fastserve-hpc stop

\b
Exit codes: 0 done, 1 internal error, 2 usage, 3 some lines or requests
failed, 75 stopped early (run the same command again).

\b
FASTSERVE_HPC_HOME is where servers leave their endpoint files for clients
to find (default ~/.fastserve-hpc). FASTSERVE_HPC_<OPTION>, as
FASTSERVE_HPC_PP=2, sets an option of serve or batch; FASTSERVE_HPC_ENDPOINT
names the server for serve and the client commands.
"""


class Commands(click.Group):
    """Imports a command's file when it is run or its help is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"fastserve_hpc.cli.{cmd_name}")
        command: click.Command = module.command
        return command

    def main(self, *args: Any, **kwargs: Any) -> Any:
        prepare_streams()
        try:
            return super().main(*args, **kwargs)
        except OSError as error:  # but for a closed pipe, with which click ends quietly
            if error.strerror is None:
                raise
            click.echo(f"error: {error.filename or 'input or output'}: {error.strerror}", err=True)
            sys.exit(int(ExitCode.INTERNAL))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            code = super().invoke(ctx)
        except FastServeError as error:
            click.echo(f"error: {error}", err=True)
            code = error.exit_code
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            code = ExitCode.STOPPED_EARLY
        ctx.exit(int(code or ExitCode.DONE))


def prepare_streams() -> None:
    """Make standard streams that a parent has closed, and let no character end a command.

    Without, the next file or socket would get a closed stream's number, and what is printed. Bytes that are not
    text come in as lone surrogates, which no request may hold; what the output cannot show goes out escaped.
    """
    for number in range(3):
        _occupy(number)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  as long as the process
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _occupy(number: int) -> None:
    """Let a descriptor that is closed stand for nothing, in children too."""
    try:
        os.fstat(number)
    except OSError:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, number)
        os.set_inheritable(number, True)
        if null != number:
            os.close(null)


@click.group(
    cls=Commands,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="fastserve-hpc")
def main() -> None:
    """FastServe-HPC serves language models on HPC clusters: live clients and batch files at the same
    time, on the same MPI ranks.
    """
