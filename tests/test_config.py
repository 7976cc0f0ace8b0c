import dataclasses
import math
import typing
from pathlib import Path
from typing import Any

import pytest

from fastserve_hpc.config import EngineConfig, ServerConfig, parse_size, state_dir
from fastserve_hpc.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("512M", 512 * 2**20), ("1.5G", 3 * 2**29), ("2 GiB", 2**31), ("8kb", 8192), ("1T", 2**40)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "M", "12X", "-1G", "1e9", "nan", "512MM"])
def test_what_is_no_size_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize("text", ["9999999999T", "9" * 400])
def test_a_size_over_all_memory_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="more than any memory"):
        parse_size(text)


def test_a_wrong_world_size_is_answered_with_the_right_one() -> None:
    config = EngineConfig(tp=2, pp=3)
    config.check_world_size(6)
    with pytest.raises(ConfigError, match=r"4 ranks were started, but --tp 2 x --pp 3 = 6: start with -n 6"):
        config.check_world_size(4)


@pytest.mark.parametrize("name", ["tp", "pp", "max_batch", "max_batch_tokens", "block_size", "max_model_len"])
def test_counts_below_one_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} 0"):
        EngineConfig(**{name: 0})


@pytest.mark.parametrize("config", [EngineConfig, ServerConfig])
def test_every_number_has_limits_and_those_outside_are_refused(config: type[Any]) -> None:
    hints = typing.get_type_hints(config)
    numbers = [f for f in dataclasses.fields(config) if hints[f.name] in (int, float, int | None)]
    assert len(numbers) >= 4
    for field in numbers:
        if field.metadata.get("size"):
            continue
        low, high = field.metadata["limits"]
        config(**{field.name: low})
        config(**{field.name: high})
        for value in (low - 1, high + 1, 10**30, math.inf, math.nan):
            with pytest.raises(ConfigError, match=f"--{field.name.replace('_', '-')} .* between {low} and {high}"):
                config(**{field.name: value})


def test_a_context_holds_a_prompt_and_an_answer() -> None:
    with pytest.raises(ConfigError, match="--max-model-len 1: it must be between 2"):
        EngineConfig(max_model_len=1)


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "x" * 65, "a b"])
def test_endpoint_names_are_safe_file_names(name: str) -> None:
    with pytest.raises(ConfigError, match="--endpoint"):
        ServerConfig(endpoint=name)


def test_every_setting_has_help() -> None:
    for config in (EngineConfig, ServerConfig):
        for field in dataclasses.fields(config):
            assert field.metadata["help"].endswith(".")


def test_state_dir_can_be_moved() -> None:
    assert state_dir({"FASTSERVE_HPC_HOME": "/scratch/x"}, Path("/home/u")) == Path("/scratch/x")
    assert state_dir({}, Path("/home/u")) == Path("/home/u/.fastserve-hpc")


def test_only_known_rules_can_be_switched_off() -> None:
    assert EngineConfig(rules_off="aging, hints").rules_without == ("aging", "hints")
    assert EngineConfig().rules_without == ()
    with pytest.raises(ConfigError, match="--rules-off luck: there is no such rule; the rules are join, sink"):
        EngineConfig(rules_off="aging,luck")
