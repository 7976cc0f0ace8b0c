"""Options that several commands share.

Those of `serve` and `batch` are made from the settings dataclasses: names, types, choices,
defaults and help live in `config.py` and nowhere else.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import click
from click.core import ParameterSource

from fastserve_hpc.config import parse_size
from fastserve_hpc.errors import ConfigError

Function = Callable[..., Any]
Decorator = Callable[[Function], Function]


class Finite(click.FloatRange):
    """A number that a clock or a length can be computed with: not NaN, not infinite."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


POSITIVE = Finite(min=0, min_open=True)
NOT_NEGATIVE = Finite(min=0)


def size(text: str | int) -> int:
    """An option's type: bytes, written as 512M or 1.5G; a default is bytes already."""
    try:
        return parse_size(str(text))
    except ConfigError as error:
        raise click.BadParameter(str(error)) from None


def config_options(*, without: tuple[str, ...] = (), **configs: type[Any]) -> Decorator:
    """One option for each field of the settings classes, but for the fields named in `without`.

    `@config_options(engine=EngineConfig)` calls the command with `engine=EngineConfig(...)`.
    An option may come from the environment too: FASTSERVE_HPC_ and its name in capitals.
    """

    def decorate(command: Function) -> Function:
        @functools.wraps(command)
        def with_settings(**values: Any) -> Any:
            settings = {name: _settings(cls, values, without) for name, cls in configs.items()}
            return command(**settings, **values)

        decorated: Function = with_settings
        for cls in reversed(configs.values()):
            hints = typing.get_type_hints(cls)
            for field in reversed(dataclasses.fields(cls)):
                if field.name not in without:
                    decorated = _config_option(field, hints[field.name])(decorated)
        return decorated

    return decorate


def _settings(cls: type[Any], values: dict[str, Any], without: tuple[str, ...]) -> Any:
    names = [field.name for field in dataclasses.fields(cls) if field.name not in without]
    return cls(**{name: values.pop(name) for name in names})


def _config_option(field: dataclasses.Field[Any], hint: Any) -> Decorator:
    return click.option(
        f"--{field.name.replace('_', '-')}",
        field.name,
        type=_click_type(field, hint),
        is_flag=hint is bool,
        default=field.default,
        show_default=field.default is not None and hint is not bool,
        help=field.metadata["help"],
        metavar=field.metadata.get("metavar"),
        envvar=f"FASTSERVE_HPC_{field.name.upper()}",
    )


def _click_type(field: dataclasses.Field[Any], hint: Any) -> Any:
    if field.metadata.get("size"):
        return size
    if typing.get_origin(hint) is Literal:
        return click.Choice(typing.get_args(hint))
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return hint


def endpoint_options(*, from_environment: bool = True) -> Decorator:
    """`--endpoint` and `--job`: which running server a client command talks to. A job stands above the environment."""

    def decorate(command: Function) -> Function:
        @functools.wraps(command)
        def with_server(endpoint: str | None, job: str | None, **values: Any) -> Any:
            if job is not None and comes_from_environment("endpoint"):
                endpoint = None
            return command(endpoint=endpoint, job=job, **values)

        endpoint = click.option(
            "--endpoint",
            metavar="NAME",
            envvar="FASTSERVE_HPC_ENDPOINT" if from_environment else None,
            help="The running server: its name, endpoint file, or address.",
        )
        job = click.option("--job", metavar="ID", help="The running server of this Slurm job.")
        return endpoint(job(with_server))

    return decorate


def comes_from_environment(name: str) -> bool:
    """Whether nobody has given the option on the command line."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.ENVIRONMENT


def json_option(help_text: str = "Print JSON, for scripts.") -> Decorator:
    """`--json`, passed on as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help=help_text)


_SAMPLING: tuple[tuple[str, type, str], ...] = (
    ("max_tokens", int, "Longest answer. Default: as much as the context still holds."),
    ("min_tokens", int, "Shortest answer."),
    ("temperature", float, "0 is greedy (the default); higher is more varied."),
    ("top_p", float, "Sample from the most likely tokens that hold this much probability."),
    ("top_k", int, "Sample from this many most likely tokens."),
    ("min_p", float, "Drop tokens less likely than this times the likeliest."),
    ("repetition_penalty", float, "Above 1: less of what has been said already."),
    ("presence_penalty", float, "Subtracted once from tokens already in the answer."),
    ("frequency_penalty", float, "Subtracted from tokens for each time they are in the answer."),
    ("seed", int, "The same seed gives the same answer."),
)


def sampling_options(command: Function) -> Function:
    """How to choose tokens. Calls the command with `sampling`: only what was given, ready for the client."""

    @functools.wraps(command)
    def with_sampling(**values: Any) -> Any:
        given = {name: value for name, _, _ in _SAMPLING if (value := values.pop(name)) is not None}
        stop, ignore_eos = values.pop("stop"), values.pop("ignore_eos")
        if stop:
            given["stop"] = tuple(stop)
        if ignore_eos:
            given["ignore_eos"] = True
        return command(sampling=given, **values)

    decorated: Function = with_sampling
    decorated = click.option("--ignore-eos", is_flag=True, help="Go on until --max-tokens.")(decorated)
    decorated = click.option("--stop", multiple=True, metavar="TEXT", help="End before this text. Repeatable.")(
        decorated
    )
    for name, kind, text in reversed(_SAMPLING):
        decorated = click.option(f"--{name.replace('_', '-')}", name, type=kind, help=text)(decorated)
    return decorated


input_path = click.Path(exists=True, dir_okay=False, path_type=Path)
output_path = click.Path(dir_okay=False, path_type=Path)
