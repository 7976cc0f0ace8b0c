from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from fastserve_hpc.cli.options import config_options, sampling_options
from fastserve_hpc.config import EngineConfig, ServerConfig, option
from fastserve_hpc.core.request import SamplingParams

Parse = Callable[..., Result]


def parsed(decorator: Any, *args: str, env: dict[str, str] | None = None) -> tuple[Result, dict[str, Any]]:
    seen: dict[str, Any] = {}

    @click.command()
    @decorator
    def command(**values: Any) -> None:
        seen.update(values)

    return CliRunner().invoke(command, args, env=env), seen


BOTH = config_options(engine=EngineConfig, server=ServerConfig)


def test_without_options_the_settings_are_their_own_defaults() -> None:
    result, seen = parsed(BOTH)
    assert result.exit_code == 0, result.output
    assert seen == {"engine": EngineConfig(), "server": ServerConfig()}


def test_every_field_is_an_option_with_its_help_and_default() -> None:
    text = " ".join(parsed(BOTH, "--help")[0].output.split())
    for cls in (EngineConfig, ServerConfig):
        for field in dataclasses.fields(cls):
            assert f"--{field.name.replace('_', '-')}" in text
            assert " ".join(field.metadata["help"].split()[:4]) in text
            if field.default not in (None, False):
                assert f"[default: {field.default}]" in text


def test_values_have_the_fields_types() -> None:
    result, seen = parsed(
        BOTH, "--tp", "2", "--device-kv", "512M", "--dtype", "float32", "--tcp", "--lease-s", "5", "--endpoint", "demo"
    )
    assert result.exit_code == 0, result.output
    assert seen["engine"] == EngineConfig(tp=2, device_kv=512 * 2**20, dtype="float32")
    assert seen["server"] == ServerConfig(tcp=True, lease_s=5.0, endpoint="demo")


def test_the_environment_sets_options_and_the_command_line_wins() -> None:
    env = {"FASTSERVE_HPC_PP": "2", "FASTSERVE_HPC_HOST_KV": "1G"}
    assert parsed(BOTH, env=env)[1]["engine"] == EngineConfig(pp=2, host_kv=2**30)
    assert parsed(BOTH, "--pp", "4", env=env)[1]["engine"].pp == 4
    result, _ = parsed(BOTH, env={"FASTSERVE_HPC_PP": "two"})
    assert result.exit_code == 2
    assert "--pp" in result.output


@pytest.mark.parametrize(
    "args", [("--device-kv", "5X"), ("--dtype", "int8"), ("--tp", "x"), ("--policy", "best"), ("--unknown",)]
)
def test_a_wrong_value_is_a_usage_error_that_names_the_option(args: tuple[str, ...]) -> None:
    result, _ = parsed(BOTH, *args)
    assert result.exit_code == 2
    assert args[0] in result.output


def test_fields_can_be_left_out() -> None:
    result, seen = parsed(config_options(without=("endpoint",), server=ServerConfig))
    assert seen == {"server": ServerConfig()}
    help_text = parsed(config_options(without=("endpoint",), server=ServerConfig), "--help")[0].output
    assert "--endpoint" not in help_text
    assert result.exit_code == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Later:
    """Settings as a later release may have them."""

    size: int = option(2**20, "A size with a default.", size=True)
    share: float | None = option(None, "A number that may be left out.")


def test_a_new_field_needs_no_other_change() -> None:
    assert parsed(config_options(later=Later))[1] == {"later": Later()}
    assert parsed(config_options(later=Later), "--size", "2K", "--share", "0.5")[1] == {
        "later": Later(size=2048, share=0.5)
    }


def test_sampling_is_what_was_given_and_fits_the_parameters() -> None:
    assert parsed(sampling_options)[1] == {"sampling": {}}
    args = ("--max-tokens", "5", "--temperature", "0", "--stop", "a", "--stop", "b", "--ignore-eos", "--top-k", "3")
    sampling = parsed(sampling_options, *args)[1]["sampling"]
    assert sampling == {"max_tokens": 5, "temperature": 0.0, "stop": ("a", "b"), "ignore_eos": True, "top_k": 3}
    SamplingParams(**sampling).validate()
