"""`fastserve-hpc score`: log-likelihoods of continuations, as evaluation harnesses want them."""

from __future__ import annotations

from typing import Any

import click

from fastserve_hpc.cli.batch_files import BatchOptions, batch_options, run_files
from fastserve_hpc.config import EngineConfig, ServerConfig
from fastserve_hpc.errors import ExitCode

_EPILOG = """\b
On a running server, beside its live clients; on ranks of its own:
  fastserve-hpc score --endpoint demo --input in.jsonl --output out.jsonl
  mpiexec -n 2 fastserve-hpc score --model smollm2-135m --pp 2 \\
      --input in.jsonl --output out.jsonl --order input

\b
A line of the input, and of the output:
  {"custom_id": "a", "context": "7 times 8 is", "continuation": " 56"}
  {"id": "batch_req_1", "custom_id": "a", "loglikelihood": -3.25,
   "is_greedy": false, "tokens": 3, "error": null}

\b
Both texts are tokenised together; white space at the end of the context
counts with the continuation; an empty context is the token that begins texts.
After exit code 75, a crash or a kill the same command goes on from there.
"""


@click.command(epilog=_EPILOG, short_help="Score continuations of contexts, for evaluation.")
@batch_options
def command(
    engine: EngineConfig, server: ServerConfig, endpoint: str | None, job: str | None, **options: Any
) -> ExitCode:
    """Write for each line how likely the model finds a continuation of a context: the log-likelihood, and
    whether greedy decoding says the same, as lm-evaluation-harness defines both.

    All that `batch` promises of its files holds: the same command again runs only what is missing.
    """
    return run_files(engine, server, endpoint, job, BatchOptions(task="score", **options))
