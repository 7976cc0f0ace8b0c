"""What is served: found and read before torch is imported, so that a wrong --model shows at once."""

from __future__ import annotations

from dataclasses import dataclass

from fastserve_hpc.config import EngineConfig
from fastserve_hpc.core.request import ModelLimits
from fastserve_hpc.models.libraries import check_libraries
from fastserve_hpc.models.locate import ModelFiles, locate
from fastserve_hpc.models.spec import ModelSpec, load_spec
from fastserve_hpc.models.tokenizer import ByteTokenizer

FAKE = "fake"
"""`--model fake`: a stand-in without weights, for trying out everything around the model."""
FAKE_MAX_MODEL_LEN = 131072


@dataclass(frozen=True, slots=True)
class Weights:
    """Where the weights are and what they are."""

    files: ModelFiles
    spec: ModelSpec


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as the front door knows it; `weights` None is the fake."""

    name: str
    limits: ModelLimits
    weights: Weights | None = None


def find_model(config: EngineConfig) -> ServedModel:
    """Raises `ModelError` or `ConfigError` for what cannot be served."""
    if config.model == FAKE:
        max_model_len = config.max_model_len or FAKE_MAX_MODEL_LEN
        return ServedModel(FAKE, ModelLimits(ByteTokenizer.vocab_size, max_model_len, ByteTokenizer.eos_token_ids))
    check_libraries()
    files = locate(config.model)
    spec = load_spec(files.path)
    spec.check_tp(config.tp)
    limits = ModelLimits(spec.vocab_size, spec.longest(config.max_model_len), spec.eos_token_ids)
    return ServedModel(files.name, limits, Weights(files, spec))
