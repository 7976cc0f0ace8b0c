"""`fastserve-hpc batch`: runs files of requests, on its own ranks or on a running server."""

from __future__ import annotations

from typing import Any

import click

from fastserve_hpc.cli.batch_files import BatchOptions, batch_options, run_files
from fastserve_hpc.config import EngineConfig, ServerConfig
from fastserve_hpc.errors import ExitCode

_EPILOG = """\b
On a running server, beside its live clients:
  fastserve-hpc batch --endpoint demo --input in.jsonl --output out.jsonl

\b
On ranks of its own, which end with the file:
  mpiexec -n 2 fastserve-hpc batch --model smollm2-135m --pp 2 \\
      --input in.jsonl --output out.jsonl

\b
A line of the input is an OpenAI batch line or just a prompt or messages:
  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
   "body": {"messages": [...]}}
  {"prompt": "Once upon a time", "max_tokens": 50}

\b
After exit code 75, a crash or a kill the same command goes on from there.
Four jobs share a file; then their results become one:
  fastserve-hpc batch --input in.jsonl --output out-$I.jsonl --shard $I/4
  fastserve-hpc batch --input in.jsonl --output out.jsonl \\
      --merge out-0.jsonl --merge ...
"""


@click.command(epilog=_EPILOG, short_help="Run files of requests.")
@click.option("--ttft", is_flag=True, help="Measure times to the first token, which costs some speed.")
@batch_options
def command(
    engine: EngineConfig, server: ServerConfig, endpoint: str | None, job: str | None, **options: Any
) -> ExitCode:
    """Run files of requests and write a result line for each as it finishes.

    With --endpoint or --job a running server does the work; else these ranks load --model and end
    with the file. A line that is wrong gets an error record, everything else goes on (exit 3). The
    same command again runs only what is missing.
    """
    return run_files(engine, server, endpoint, job, BatchOptions(task="batch", **options))
