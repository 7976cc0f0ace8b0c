"""What `batch` and `score` have in common: their options, and running files on own ranks or on a running server."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from fastserve_hpc.cli.counted import counted_parts
from fastserve_hpc.cli.options import (
    NOT_NEGATIVE,
    Finite,
    config_options,
    endpoint_options,
    json_option,
    output_path,
)
from fastserve_hpc.config import EngineConfig, ServerConfig
from fastserve_hpc.core.request import DEFAULT_SLOWDOWN
from fastserve_hpc.errors import ConfigError, ExitCode, ModelError

if TYPE_CHECKING:
    from fastserve_hpc.batch.attached import BatchFiles, Ending
    from fastserve_hpc.batch.reader import Task

_PRIVATE = ("endpoint", "tcp", "batch_slowdown")
"""Settings of a server that mean something else here, or nothing."""
_ENGINE_SETTINGS = ("dtype", "seed", "max_model_len")
"""Settings that change answers."""
_RECONNECT_S = 60.0

_input_path = click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path)
Command = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """The options of the command itself."""

    task: Task
    inputs: tuple[Path, ...]
    output: Path
    errors: Path | None
    resume: bool
    overwrite: bool
    retry_failed: bool
    order: str
    shard: str
    merge: tuple[Path, ...]
    in_flight: int
    ttft: bool = False
    batch_slowdown: float | None
    deadline: float | None
    reconnect_s: float | None
    engine_setting: tuple[tuple[str, str], ...]
    progress_json: bool
    as_json: bool

    def __post_init__(self) -> None:
        if self.resume and self.overwrite:
            raise ConfigError("--resume and --overwrite: choose one")
        if str(self.output) == "-" and (self.order == "input" or self.merge or self.retry_failed):
            raise ConfigError("--output -: --order input, --merge and --retry-failed need a file")

    def arguments(self) -> list[str]:
        """The command line that says the same to a runner beside a server of its own."""
        flags = {
            "--overwrite": self.overwrite,
            "--retry-failed": self.retry_failed,
            "--ttft": self.ttft,
            "--progress-json": self.progress_json,
            "--json": self.as_json,
        }
        errors = [] if self.errors is None else ["--errors", str(self.errors)]
        values = [word for path in self.inputs for word in ("--input", str(path))]
        values += ["--output", str(self.output), *errors, "--order", self.order, "--shard", self.shard]
        if self.deadline is not None:  # the ranks' start counts
            values += ["--deadline", datetime.datetime.fromtimestamp(self.deadline).isoformat()]
        values += ["--in-flight", str(self.in_flight), *(flag for flag, given in flags.items() if given)]
        return [self.task, *values]

    def files(self) -> BatchFiles:
        """Raises `ConfigError` where nothing could be read or written."""
        from fastserve_hpc.batch.attached import BatchFiles
        from fastserve_hpc.batch.output import Mode, Place
        from fastserve_hpc.batch.survey import Shard

        place = Place(self.output, self.errors)
        place.check((*self.inputs, *self.merge))
        return BatchFiles(
            task=self.task,
            inputs=self.inputs,
            place=place,
            shard=Shard.parse(self.shard),
            mode=Mode(self.overwrite, self.retry_failed),
            sorts=self.order == "input",
            in_flight=self.in_flight,
            wants_ttft=self.ttft,
            slowdown=DEFAULT_SLOWDOWN if self.batch_slowdown is None else self.batch_slowdown,
            deadline=self.deadline,
            reconnect_s=_RECONNECT_S if self.reconnect_s is None else self.reconnect_s,
            engine=dict(self.engine_setting),
            json_progress=self.progress_json,
        )


def _deadline(ctx: click.Context, param: click.Parameter, text: str | None) -> float | None:
    from fastserve_hpc.batch.deadline import parse_deadline

    try:
        return None if text is None else parse_deadline(text)
    except ConfigError as error:
        raise click.BadParameter(str(error), ctx, param) from None


_OPTIONS = (
    click.option(
        "--input", "inputs", type=_input_path, multiple=True, required=True, metavar="FILE",
        help="JSON lines: the requests; .gz and .zst are unpacked, - is standard input. Repeatable.",
    ),
    click.option(
        "--output", type=output_path, required=True, metavar="FILE",
        help="JSON lines: a result for each request; - is standard output.",
    ),
    click.option("--errors", type=output_path, metavar="FILE", help="Error records go here, not into --output."),
    click.option("--resume", is_flag=True, help="Go on where an earlier run ended: what happens anyway."),
    click.option("--overwrite", "--force", is_flag=True, help="Start anew; results that --output holds are lost."),
    click.option("--retry-failed", is_flag=True, help="Run lines again that have an error record."),
    click.option(
        "--order", type=click.Choice(("finished", "input")), default="finished", show_default=True,
        help="Order of the results, once all are there.",
    ),
    click.option("--shard", default="0/1", metavar="I/N", help="Run every N-th line alone, from line I+1 on."),
    click.option(
        "--merge", type=_input_path, multiple=True, metavar="FILE",
        help="Run nothing, but gather the results of shards from their outputs. Repeatable.",
    ),
    click.option(
        "--in-flight", type=click.IntRange(min=1), default=256, show_default=True, help="Requests sent at a time."
    ),
    click.option(
        "--batch-slowdown", type=Finite(min=1), metavar="S",
        help="On a running server: interactive requests may take at most so many times as long because of this run.  "
        f"[default: {DEFAULT_SLOWDOWN:g}]",
    ),
    click.option(
        "--deadline", callback=_deadline, metavar="WHEN",
        help="Be done by 18:30, by 2030-01-31T08:00, or in 90m; costs others more than S as it draws near.",
    ),
    click.option(
        "--reconnect-s", type=NOT_NEGATIVE, metavar="S",
        help=f"How long a running server that is lost may take to come back.  [default: {_RECONNECT_S:g}]",
    ),
    click.option("--engine-setting", type=(str, str), multiple=True, hidden=True),
    click.option("--progress-json", is_flag=True, help="Show progress as JSON lines."),
    json_option("Print the summary as JSON."),
    endpoint_options(from_environment=False),
    config_options(without=_PRIVATE, engine=EngineConfig, server=ServerConfig),
)  # fmt: skip


def batch_options(command: Command) -> Command:
    """All options of a command that runs files."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def run_files(
    engine: EngineConfig, server: ServerConfig, endpoint: str | None, job: str | None, batch: BatchOptions
) -> ExitCode:
    """On the running server that is named; without one, on these ranks."""
    files = batch.files()
    if endpoint is None and job is None and not batch.merge:
        if batch.batch_slowdown is not None:
            raise ConfigError(
                "--batch-slowdown bounds what the users of a running server lose, and ranks of its own have none: "
                "give --endpoint or --job, or leave it out"
            )
        from fastserve_hpc import boot

        return boot.run_batch(engine, server, [*batch.arguments(), *_own_server(engine)])
    _refuse_engine_options(click.get_current_context())
    if batch.merge:
        return _show(_merge(files, batch, endpoint or job), batch)
    from fastserve_hpc.batch.attached import run_attached

    return _show(run_attached(files, endpoint, job), batch)


def _merge(files: BatchFiles, batch: BatchOptions, server: str | None) -> Ending:
    from fastserve_hpc.batch.merge import merge

    if server is not None or batch.shard != "0/1":
        raise ConfigError("--merge asks no server and gathers all shards: leave --endpoint, --job and --shard out")
    return merge(files, batch.merge)


def _own_server(engine: EngineConfig) -> list[str]:
    """What a runner is told of a server that lives and dies with it."""
    from fastserve_hpc.batch.manifest import engine_settings
    from fastserve_hpc.models.locate import locate

    try:
        model = None if engine.model == "fake" else locate(engine.model).path
        settings = engine_settings(model, {name: getattr(engine, name) for name in _ENGINE_SETTINGS})
    except (ModelError, OSError):
        settings = {}  # the ranks will say it better
    told = [word for setting in settings.items() for word in ("--engine-setting", *setting)]
    return ["--reconnect-s", "0", *told]


def _refuse_engine_options(ctx: click.Context) -> None:
    """Options of an engine say nothing to a server that runs already."""
    for param in ctx.command.params:
        is_setting = param.envvar is not None
        given = param.name is not None and ctx.get_parameter_source(param.name) is ParameterSource.COMMANDLINE
        if is_setting and given:
            raise ConfigError(f"{param.opts[0]} has no effect on a running server: leave it or --endpoint/--job out")


def _show(ending: Ending, batch: BatchOptions) -> ExitCode:
    summary = ending.counts.summary()
    text = json.dumps({**summary, "lines": ending.total, "output": str(batch.output)})
    if not batch.as_json:
        text = (_merge_line if batch.merge else _summary_line)(summary, batch.output)
    click.echo(text, err=str(batch.output) == "-")
    if ending.stopped is not None:
        done = f"{ending.counts.finished} of {ending.total} lines are done; run the same command again to go on"
        click.echo(f"error: {ending.stopped}; {done}", err=True)
        return ExitCode.STOPPED_EARLY
    return ExitCode.SOME_LINES_FAILED if ending.counts.all_failed else ExitCode.DONE


def _merge_line(summary: dict[str, Any], output: Path) -> str:
    skipped = f", {summary['skipped']} were there already" if summary["skipped"] else ""
    return f"{summary['requests']} records merged, {summary['failed']} of them errors{skipped}; results in {output}"


def _summary_line(summary: dict[str, Any], output: Path) -> str:
    skipped = f", {summary['skipped']} were there already" if summary["skipped"] else ""
    if summary["failed_before"]:
        skipped += f" ({summary['failed_before']} of them failed)"
    return (
        f"{summary['requests']} requests in {summary['wall_s']:.1f} s, {summary['failed']} failed{skipped}: "
        f"{_tokens(summary)}{_used(summary)}; "
        f"results in {output}"
    )


def _tokens(summary: dict[str, Any]) -> str:
    kind = "output" if summary["output_tokens"] else "prompt"
    count = summary[f"{kind}_tokens"]
    return f"{count} {'' if kind == 'output' else 'prompt '}tokens, {count / summary['wall_s']:.0f} tokens/s"


def _used(summary: dict[str, Any]) -> str:
    """What the server says of the time of the run."""
    return "".join(f", {part}" for part in counted_parts(summary, summary["prompt_tokens"]))
