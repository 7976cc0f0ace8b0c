from __future__ import annotations

import pytest

from fastserve_hpc.boot.models import ServedModel, find_model
from fastserve_hpc.boot.workers import limit_length
from fastserve_hpc.boot.world import World, is_first_rank
from fastserve_hpc.config import EngineConfig
from fastserve_hpc.core.request import ModelLimits
from fastserve_hpc.errors import ConfigError
from fastserve_hpc.parallel.topology import Topology

MODEL = ServedModel("m", ModelLimits(vocab_size=10, max_model_len=100, eos_token_ids=()))
WORLD = World(Topology())


def test_a_small_kv_cache_limits_requests_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert limit_length(EngineConfig(block_size=16), 5, MODEL, WORLD) == 80
    assert "5 blocks, 80 tokens" in capsys.readouterr().err


def test_an_ample_kv_cache_leaves_the_models_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert limit_length(EngineConfig(block_size=16), 7, MODEL, WORLD) == 100
    assert capsys.readouterr().err == ""


def test_a_limit_that_was_asked_for_is_not_cut_silently() -> None:
    with pytest.raises(ConfigError, match="--max-model-len 100, but .* lower it to 80"):
        limit_length(EngineConfig(block_size=16, max_model_len=100), 5, MODEL, WORLD)


def test_more_than_the_model_was_trained_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="--max-model-len 9000: .* 8192 positions"):
        find_model(EngineConfig(max_model_len=9000))


def test_the_model_is_known_before_torch_is_needed() -> None:
    model = find_model(EngineConfig())
    assert model.name == "smollm2-135m"
    assert model.limits == ModelLimits(vocab_size=49152, max_model_len=8192, eos_token_ids=(2,))


@pytest.mark.parametrize(
    ("environ", "is_first"),
    [({}, True), ({"PMI_RANK": "0"}, True), ({"PMI_RANK": "3"}, False), ({"OMPI_COMM_WORLD_RANK": "1"}, False)],
)
def test_who_speaks_for_all_before_mpi_is_up(environ: dict[str, str], is_first: bool) -> None:
    assert is_first_rank(environ) is is_first
