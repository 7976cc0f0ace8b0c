"""Puts a rank together and runs it: what `serve` and `batch` do on every rank.

The order matters. Signals are blocked before any library starts a thread; the ingress starts before
MPI, whose variables it must not inherit; torch is imported last, while the ingress reads the tokenizer.
"""

from __future__ import annotations

from fastserve_hpc.config import EngineConfig, ServerConfig
from fastserve_hpc.errors import ExitCode


def run_server(engine: EngineConfig, server: ServerConfig) -> ExitCode:
    """Serve until told to drain. Every rank calls it with the same settings."""
    from fastserve_hpc.boot.rank import run_rank

    return run_rank(engine, server, batch_args=None)


def run_batch(engine: EngineConfig, server: ServerConfig, batch_args: list[str]) -> ExitCode:
    """Serve one batch file and end with it: `batch_args` are the command and the arguments of its client."""
    from fastserve_hpc.boot.rank import run_rank

    return run_rank(engine, server, batch_args)
