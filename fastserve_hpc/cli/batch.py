"""`fastserve-hpc batch`: runs a file of requests, on its own ranks or on a running server."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from fastserve_hpc.cli.options import config_options, endpoint_options, input_path, json_option, output_path
from fastserve_hpc.config import EngineConfig, ServerConfig
from fastserve_hpc.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from fastserve_hpc.batch.attached import Ending
    from fastserve_hpc.batch.writer import Mode

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

    def __post_init__(self) -> None:
        if self.resume and self.overwrite:
            raise ConfigError("--resume and --overwrite: choose one")

    @property
    def mode(self) -> Mode:
        return "resume" if self.resume else "overwrite" if self.overwrite else "new"

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
    from fastserve_hpc.batch.writer import check_output

    batch = BatchFiles(**files)
    check_output(batch.output, batch.mode)
    if endpoint is None and job is None:
        from fastserve_hpc import boot

        return boot.run_batch(engine, server, batch.arguments())
    _refuse_engine_options(click.get_current_context())
    from fastserve_hpc.batch.attached import run_attached

    ending = run_attached(batch.input, batch.output, batch.mode, batch.in_flight, endpoint, job)
    return _show(ending, batch)


def _refuse_engine_options(ctx: click.Context) -> None:
    """Options of an engine say nothing to a server that runs already."""
    for param in ctx.command.params:
        is_setting = param.envvar is not None
        given = param.name is not None and ctx.get_parameter_source(param.name) is ParameterSource.COMMANDLINE
        if is_setting and given:
            raise ConfigError(f"{param.opts[0]} has no effect on a running server: leave it or --endpoint/--job out")


def _show(ending: Ending, batch: BatchFiles) -> ExitCode:
    summary = ending.counts.summary()
    if batch.as_json:
        click.echo(json.dumps({**summary, "output": str(batch.output)}))
    else:
        click.echo(_summary_line(summary, batch.output))
    if ending.stopped is not None:
        done = f"{ending.counts.finished} of {ending.total} lines are done; go on with --resume"
        click.echo(f"error: {ending.stopped}; {done}", err=True)
        return ExitCode.STOPPED_EARLY
    return ExitCode.SOME_LINES_FAILED if ending.counts.failed else ExitCode.DONE


def _summary_line(summary: dict[str, Any], output: Path) -> str:
    skipped = f", {summary['skipped']} were there already" if summary["skipped"] else ""
    return (
        f"{summary['requests']} requests in {summary['wall_s']:.1f} s, {summary['failed']} failed{skipped}: "
        f"{summary['output_tokens']} tokens, {summary['output_tokens_per_s']:.0f} tokens/s; results in {output}"
    )
