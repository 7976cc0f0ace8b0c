"""The costs that the scheduler begins with: those of an earlier start on the same ranks, or measured now."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import fastserve_hpc
from fastserve_hpc.boot.models import ServedModel, Weights
from fastserve_hpc.boot.workers import BuiltWorker
from fastserve_hpc.boot.world import World
from fastserve_hpc.config import EngineConfig, state_dir
from fastserve_hpc.core.cost import CostModel, Costs
from fastserve_hpc.core.probes import ProbeLimits
from fastserve_hpc.parallel.control import Control
from fastserve_hpc.parallel.idle import Backoff
from fastserve_hpc.server.calibration import DIRECTORY, Calibrated, Prober, Setting, Shape, load, save
from fastserve_hpc.sim.shapes import ModelShape

_ENOUGH_OBSERVED = 200
"""Iterations after which what was learned is worth more than what was measured at the start."""


class KnownCosts:
    """The costs on rank 0's disk. Nothing is measured of the fake model."""

    def __init__(self, engine: EngineConfig, model: ServedModel, built: BuiltWorker):
        self._engine = engine
        self._weights = model.weights
        self._built = built
        self._directory = state_dir(dict(os.environ), Path.home()) / DIRECTORY

    def begin(self, control: Control, world: World) -> Calibrated:
        """Before the coordinator runs: where nothing is known yet, all ranks compute what is published here."""
        if self._weights is None:
            return Calibrated(CostModel())
        known = load(self._directory, self._setting(self._weights))
        if known is not None:
            return Calibrated(known)
        prober = Prober(control, self._built.worker, Backoff(), check_abort=world.check)
        found = prober.measure(self._limits())
        self._save(self._weights, found.cost)
        world.say(f"measured an iteration: {_in_words(found.cost.costs)}, within {found.cost.relative_error or 0:.0%}")
        return found

    def keep(self, cost: CostModel) -> None:
        """After the end: what was learned meanwhile is for the next start."""
        if self._weights is not None and cost.num_observed >= _ENOUGH_OBSERVED:
            self._save(self._weights, cost)

    def _save(self, weights: Weights, cost: CostModel) -> None:
        save(self._directory, self._setting(weights), _shape(weights, self._built.number_bytes), cost)

    def _setting(self, weights: Weights) -> Setting:
        return Setting(
            model=str(weights.files.path),
            compute=self._built.compute,
            tp=self._engine.tp,
            pp=self._engine.pp,
            host=socket.gethostname(),
            version=fastserve_hpc.__version__,
        )

    def _limits(self) -> ProbeLimits:
        return ProbeLimits(
            max_batch=self._engine.max_batch,
            max_batch_tokens=self._engine.max_batch_tokens,
            max_model_len=self._built.max_model_len,
            num_blocks=self._built.num_blocks,
            block_size=self._engine.block_size,
        )


def _shape(weights: Weights, number_bytes: int) -> Shape:
    spec = weights.spec
    size = (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.intermediate_size)
    parameters = ModelShape(spec.name, *size, spec.vocab_size, 3 if spec.is_gated else 2).num_parameters
    return Shape(
        weight_bytes=parameters * number_bytes,
        num_parameters=parameters,
        kv_bytes_per_token=2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * number_bytes,
    )


def _in_words(costs: Costs) -> str:
    return (
        f"{1e3 * costs.fixed_s:.2g} ms + {1e3 * costs.prefill_token_s:.2g} ms a prompt token, "
        f"{1e3 * costs.decode_sequence_s:.2g} ms a decode"
    )
