"""`fastserve-hpc doctor`: the checks that every start makes, alone."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import click
import msgspec

from fastserve_hpc.cli.options import config_options, json_option
from fastserve_hpc.config import EngineConfig, ServerConfig
from fastserve_hpc.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from rich.table import Table

    from fastserve_hpc.doctor import Finding
    from fastserve_hpc.parallel.mpi_api import MPI

_EPILOG = """\b
In a Slurm job, the way the server will be started:
  srun -N2 --ntasks-per-node=1 \\
      fastserve-hpc doctor --model /models/llama --pp 2
"""

_FILE_WIDTH = 200
_STYLES = {"ok": "green", "warning": "yellow", "error": "red"}


@click.command(epilog=_EPILOG, short_help="Check ranks, nodes, links, model and memory.")
@json_option("Print the findings as JSON lines.")
@config_options(engine=EngineConfig, server=ServerConfig)
def command(engine: EngineConfig, server: ServerConfig, as_json: bool) -> ExitCode:  # noqa: ARG001  made: checked
    """Check what a start depends on, without loading a model: on all ranks of this MPI world, or on one.

    Takes the options of `serve`: write `doctor` in its place. Ends with 2 if something would keep it from starting.
    """
    from fastserve_hpc.doctor import at_level, raise_errors, run
    from fastserve_hpc.parallel.mpi_init import finalize_mpi, world_size_from_env

    world = None if world_size_from_env(os.environ) == 1 else _init_mpi()
    findings = run(world, engine, os.environ)
    if world is None or world.rank == 0:
        _print(findings, as_json)
        sys.stdout.flush()
    try:
        raise_errors(findings, world)
    except ConfigError as error:
        if any(found.check == "links" for found in at_level(findings, "error")):
            os._exit(int(error.exit_code))  # MPI is still up, and its end at exit would wait for the lost rank
        return error.exit_code
    if world is not None:
        finalize_mpi(world)
    return ExitCode.DONE


def _init_mpi() -> MPI.Intracomm:
    """Impatient where a node does not answer."""
    from fastserve_hpc.doctor import preflight
    from fastserve_hpc.parallel.mpi_init import init_mpi

    silent = preflight(os.environ)
    for finding in silent:
        click.echo(f"{finding.level}: {finding}", err=True)
    return init_mpi(os.environ, warn_after_s=5, give_up_after_s=10) if silent else init_mpi(os.environ)


def _print(findings: list[Finding], as_json: bool) -> None:
    if as_json:
        for finding in findings:
            click.echo(json.dumps(msgspec.to_builtins(finding)))
        return
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else _FILE_WIDTH).print(_table(findings))


def _table(findings: list[Finding]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("", "check", "where", "found", "cure", box=None, pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"
    for finding in findings:
        where = "" if finding.rank is None else f"rank {finding.rank}, {finding.host}"
        level = Text(finding.level, style=_STYLES[finding.level])
        table.add_row(level, finding.check, Text(where), Text(finding.value), Text(finding.cure))
    return table
