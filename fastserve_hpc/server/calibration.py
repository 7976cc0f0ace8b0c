"""The costs of an iteration, measured on the ranks before they serve, and kept for the next start.

A file in the state directory holds what was measured for one model, number type, split and host. Who cannot read or
write there measures at every start.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from fastserve_hpc.core.cost import CostModel, Costs, Measurement, load_of
from fastserve_hpc.core.plan import IterationPlan, RankReport
from fastserve_hpc.core.probes import Probe, ProbeLimits, ProbePlans, probes
from fastserve_hpc.parallel.control import Control

BUDGET_S = 1.5
"""After it no further probe begins, once a prompt and a decode are measured."""
_NUM_ROUNDS = 3
"""The least time counts: whatever disturbs makes it longer."""
_FEWEST = 2
DIRECTORY = "calibration"


class Worker(Protocol):
    """This rank's part of the model."""

    def execute(self, plan: IterationPlan) -> RankReport: ...


class Backoff(Protocol):
    """Pauses that grow until there was work (`parallel.idle.Backoff`)."""

    def pause(self) -> None: ...

    def reset(self) -> None: ...


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What the costs hold for."""

    model: str
    compute: str
    """What the ranks compute with, and in which number type."""
    tp: int
    pp: int
    host: str
    version: str


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The model's size: what the simulator makes of the costs for other models."""

    weight_bytes: int
    num_parameters: int
    kv_bytes_per_token: int


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A calibration file."""

    setting: Setting
    shape: Shape
    costs: dict[str, float]
    error: float


@dataclass(frozen=True, slots=True)
class Calibrated:
    """The costs to begin with, and the last of the plans that measured them."""

    cost: CostModel
    last_plan_id: int = 0


class Prober:
    """Computes probes on all ranks, one after the other. Only before the coordinator runs."""

    def __init__(
        self,
        control: Control,
        worker: Worker,
        backoff: Backoff,
        *,
        check_abort: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._control = control
        self._worker = worker
        self._backoff = backoff
        self._check_abort = check_abort
        self._clock = clock

    def measure(self, limits: ProbeLimits, budget_s: float = BUDGET_S) -> Calibrated:
        """Collective: every rank computes what is published here."""
        plans = ProbePlans(limits.block_size)
        measured = self._measure(plans, limits, self._clock() + budget_s)
        self._compute(plans.end())  # also waited for: the scheduler knows nothing of it
        return Calibrated(CostModel.calibrated(measured), plans.last_plan_id)

    def _measure(self, plans: ProbePlans, limits: ProbeLimits, deadline: float) -> list[Measurement]:
        least: dict[Probe, Measurement] = {}
        for probe in _rounds(limits):
            if len(least) >= _FEWEST and self._clock() >= deadline:
                break
            plan = plans.plan(probe)
            seconds = self._compute(plan)
            known = least.get(probe)
            if seconds > 0 and (known is None or seconds < known[1]):
                least[probe] = (load_of(plan.slices), seconds)
        return list(least.values())

    def _compute(self, plan: IterationPlan) -> float:
        """Seconds that the plan took in its last stage."""
        self._control.publish(plan)
        reports = [self._worker.execute(plan)]
        self._backoff.reset()
        while True:
            for report in reports:
                if report.result is not None and report.result.plan_id == plan.plan_id:
                    return report.result.compute_s
            self._check_abort()
            self._backoff.pause()
            reports = self._control.collect()


def _rounds(limits: ProbeLimits) -> Iterator[Probe]:
    for _ in range(_NUM_ROUNDS):
        yield from probes(limits)


def latest(directory: Path, host: str) -> Record | None:
    """The newest record of one rank on this host."""
    found = [(path.stat().st_mtime, record) for path in directory.glob("*.json") if (record := _read(path)) is not None]
    alone = [item for item in found if (item[1].setting.host, item[1].setting.tp, item[1].setting.pp) == (host, 1, 1)]
    return max(alone, key=lambda item: item[0])[1] if alone else None


def costs_in(record: Record) -> Costs:
    """Raises TypeError where they are not those of an iteration."""
    return Costs(**record.costs)


def _read(path: Path) -> Record | None:
    """None where there is nothing, or nothing that can be used."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=Record)
        costs_in(record)
    except (OSError, msgspec.MsgspecError, TypeError):
        return None
    return record if all(0 <= value < 1e3 for value in record.costs.values()) else None


def load(directory: Path, setting: Setting) -> CostModel | None:
    """What was measured for the same setting before; None where nothing is, or nothing that can be used."""
    record = _read(_path(directory, setting))
    if record is None or record.setting != setting:
        return None
    cost = CostModel(costs_in(record))
    cost.relative_error = record.error
    return cost


def save(directory: Path, setting: Setting, shape: Shape, cost: CostModel) -> None:
    """Keep it for the next start, if the directory takes it."""
    error = cost.relative_error or 0.0
    record = Record(setting=setting, shape=shape, costs=asdict(cost.costs), error=error)
    path = _path(directory, setting)
    whole = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        whole.write_bytes(msgspec.json.format(msgspec.json.encode(record)))
        whole.replace(path)


def _path(directory: Path, setting: Setting) -> Path:
    return directory / f"{hashlib.sha256(msgspec.json.encode(setting)).hexdigest()[:16]}.json"
