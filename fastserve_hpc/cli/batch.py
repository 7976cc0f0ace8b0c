"""`fastserve-hpc batch`: runs a file of requests, on its own ranks or on a running server."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from fastserve_hpc.cli.options import config_options, endpoint_options, input_path, json_option, output_path
from fastserve_hpc.config import EngineConfig, ServerConfig
from fastserve_hpc.errors import ConfigError, EndpointError, ExitCode

_EPILOG = """\b
On a running server, beside its live clients:
  fastserve-hpc batch --endpoint demo --input in.jsonl --output out.jsonl

\b
On ranks of its own, which end with the file:
  mpiexec -n 2 fastserve-hpc batch --model smollm2-135m --pp 2 --input in.jsonl --output out.jsonl

\b
A line of the input is an OpenAI batch line or just a prompt or messages:
  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}
  {"prompt": "Once upon a time", "max_tokens": 50}
"""

_PRIVATE = ("endpoint", "tcp")
"""Server settings that a server of one batch file has no use for."""


@dataclass(frozen=True, slots=True)
class BatchFiles:
    """What to read, where to write, and how."""

    input: Path
    output: Path
    in_flight: int
    resume: bool
    overwrite: bool
    as_json: bool

    def arguments(self) -> list[str]:
        """The command line that says the same."""
        flags = {"--resume": self.resume, "--overwrite": self.overwrite, "--json": self.as_json}
        values = ["--input", str(self.input), "--output", str(self.output), "--in-flight", str(self.in_flight)]
        return [*values, *(flag for flag, given in flags.items() if given)]


@click.command(epilog=_EPILOG, short_help="Run a file of requests.")
@click.option("--input", "input", type=input_path, required=True, help="JSON lines: the requests.")
@click.option("--output", "output", type=output_path, required=True, help="JSON lines: a result for each request.")
@click.option("--resume", is_flag=True, help="Keep the results in --output and run only the lines that it lacks.")
@click.option("--overwrite", is_flag=True, help="Start again where --output holds results already.")
@click.option(
    "--in-flight", type=click.IntRange(min=1), default=256, show_default=True, help="Requests sent at a time."
)
@json_option("Print the summary as JSON.")
@endpoint_options(from_environment=False)
@config_options(without=_PRIVATE, engine=EngineConfig, server=ServerConfig)
def command(
    engine: EngineConfig, server: ServerConfig, endpoint: str | None, job: str | None, **files: Any
) -> ExitCode:
    """Run a file of requests and write a result line for each as it finishes.

    With --endpoint or --job a running server does the work; else these ranks load --model and end
    with the file. A line that is wrong gets an error record, everything else goes on (exit 3).
    """
    batch = BatchFiles(**files)
    _check_output(batch)
    if endpoint is None and job is None:
        from fastserve_hpc import boot

        return boot.run_batch(engine, server, batch.arguments())
    _refuse_engine_options(click.get_current_context())
    return asyncio.run(_attached(batch, endpoint, job))


def _check_output(batch: BatchFiles) -> None:
    from fastserve_hpc.batch.writer import check_output

    if batch.resume and batch.overwrite:
        raise ConfigError("--resume and --overwrite: choose one")
    check_output(batch.output, _mode(batch))


def _mode(batch: BatchFiles) -> Any:
    return "resume" if batch.resume else "overwrite" if batch.overwrite else "new"


def _refuse_engine_options(ctx: click.Context) -> None:
    """Options of an engine say nothing to a server that runs already."""
    for param in ctx.command.params:
        ours = param.envvar is not None
        if ours and param.name and ctx.get_parameter_source(param.name) is click.core.ParameterSource.COMMANDLINE:
            raise ConfigError(f"{param.opts[0]} has no effect on a running server: leave it or --endpoint/--job out")


async def _attached(batch: BatchFiles, endpoint: str | None, job: str | None) -> ExitCode:
    from fastserve_hpc.batch.progress import make_progress
    from fastserve_hpc.batch.reader import count_lines, read_batch
    from fastserve_hpc.batch.runner import BatchRunner
    from fastserve_hpc.batch.writer import ResultWriter
    from fastserve_hpc.client import AsyncClient

    _end_on_signals()
    with batch.input.open("rb") as lines:
        total = count_lines(lines)
        lines.seek(0)
        async with AsyncClient(endpoint, job=job) as client:
            model = (await client.status()).model
            with ResultWriter(batch.output, _mode(batch)) as writer, make_progress(total) as progress:
                runner = BatchRunner(client, model, writer, progress, batch.in_flight)
                ended = await _run(runner, read_batch(lines))
    _show(runner.counts.summary(), batch)
    if ended is not None:
        finished = f"{runner.counts.finished} of {total} lines are done; go on with --resume"
        click.echo(f"error: {ended}; {finished}", err=True)
        return ExitCode.STOPPED_EARLY
    return ExitCode.SOME_LINES_FAILED if runner.counts.failed else ExitCode.DONE


async def _run(runner: Any, items: Any) -> str | None:
    """Why the run ended early; None when it did not."""
    try:
        await runner.run(items)
    except EndpointError as error:
        return str(error)
    except asyncio.CancelledError:
        return "told to stop"
    return None


def _end_on_signals() -> None:
    task = asyncio.current_task()
    for number in (signal.SIGINT, signal.SIGTERM):
        if task is not None:
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)


def _show(summary: dict[str, Any], batch: BatchFiles) -> None:
    if batch.as_json:
        click.echo(json.dumps({**summary, "output": str(batch.output)}))
        return
    skipped = f", {summary['skipped']} were there already" if summary["skipped"] else ""
    click.echo(
        f"{summary['requests']} requests in {summary['wall_s']:.1f} s, {summary['failed']} failed{skipped}: "
        f"{summary['output_tokens']} tokens, {summary['output_tokens_per_s']:.0f} tokens/s; results in {batch.output}"
    )
    sys.stdout.flush()
