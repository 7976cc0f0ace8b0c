"""`fastserve-hpc serve`: one rank of a server; every rank runs the same command line."""

from __future__ import annotations

import click

from fastserve_hpc.cli.options import config_options
from fastserve_hpc.config import EngineConfig, ServerConfig
from fastserve_hpc.errors import ExitCode

_EPILOG = """\b
On this machine, on one rank and on two:
  fastserve-hpc serve --model smollm2-135m --endpoint demo
  mpiexec -n 2 fastserve-hpc serve --model smollm2-135m --pp 2 --endpoint demo

\b
In a Slurm job, eight GPUs on two nodes:
  srun -N2 --ntasks-per-node=4 \\
      fastserve-hpc serve --model /models/llama --tp 4 --pp 2

It says 'ready endpoint=NAME ...' on standard output when clients may come. SIGTERM or Ctrl-C
lets running requests finish; a second one ends it at once.
"""


@click.command(epilog=_EPILOG, short_help="Serve a model to clients on these ranks.")
@config_options(engine=EngineConfig, server=ServerConfig)
def command(engine: EngineConfig, server: ServerConfig) -> ExitCode:
    """Serve a model to clients, on all ranks of this MPI world (or on one, without MPI)."""
    # Only here: boot blocks signals before it imports what must not start a thread earlier.
    from fastserve_hpc import boot

    return boot.run_server(engine, server)
