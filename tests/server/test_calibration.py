"""The costs of an iteration: measured on the ranks, kept for the next start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from fastserve_hpc.core.cost import CostModel, Costs, IterationLoad, load_of
from fastserve_hpc.core.plan import IterationPlan, IterationResult, RankReport
from fastserve_hpc.core.probes import ProbeLimits
from fastserve_hpc.errors import RankError
from fastserve_hpc.parallel.control import LocalControl
from fastserve_hpc.server.calibration import Prober, Setting, Shape, costs_in, latest, load, save

TRUE = Costs(fixed_s=5e-3, prefill_token_s=4e-4, prefill_attention_s=3e-8, decode_sequence_s=3e-4, kv_token_s=1e-7)
LIMITS = ProbeLimits(max_batch=64, max_batch_tokens=512, max_model_len=2048, num_blocks=1000, block_size=16)
SETTING = Setting(model="m", compute="kernels", tp=1, pp=1, host="h", version="1")
SHAPE = Shape(weight_bytes=2, num_parameters=1, kv_bytes_per_token=4)


class Idle:
    def pause(self) -> None: ...

    def reset(self) -> None: ...


class Machine:
    """Ranks whose iterations take what `costs` say; the first of each size twice as long."""

    def __init__(self, costs: Costs = TRUE, slow_s: float = 0.0):
        self.costs = costs
        self.now = 0.0
        self.plans: list[IterationPlan] = []
        self._slow_s = slow_s
        self._seen: set[IterationLoad] = set()

    def execute(self, plan: IterationPlan) -> RankReport:
        self.plans.append(plan)
        load = load_of(plan.slices)
        seconds = self.costs.predict(load) * (1 if load in self._seen else 2)
        self._seen.add(load)
        self.now += seconds + self._slow_s
        return RankReport(0, plan.plan_id, 0, 0, IterationResult(plan.plan_id, compute_s=seconds))

    def prober(self, **options: object) -> Prober:
        return Prober(LocalControl(), self, Idle(), clock=lambda: self.now, **options)  # type: ignore[arg-type]


def test_the_machine_s_costs_are_found() -> None:
    machine = Machine()
    found = machine.prober().measure(LIMITS)
    assert found.last_plan_id == machine.plans[-1].plan_id == len(machine.plans)
    assert not machine.plans[-1].slices
    error = found.cost.relative_error
    assert error is not None
    assert error < 0.02
    for work in (IterationLoad(300, 45_150), IterationLoad(decode_sequences=40, kv_tokens_read=8000)):
        assert found.cost.costs.predict(work) == pytest.approx(TRUE.predict(work), rel=0.05)


@pytest.mark.parametrize("factor", [0.01, 100.0])
def test_whatever_its_speed(factor: float) -> None:
    costs = Costs(*(factor * getattr(TRUE, name) for name in Costs.__slots__))
    found = Machine(costs).prober().measure(LIMITS, budget_s=1e9).cost.costs
    assert found.output_token_s(16) == pytest.approx(costs.output_token_s(16), rel=0.1)
    assert found.prefill_token_s == pytest.approx(costs.prefill_token_s, rel=0.1)


def test_a_slow_machine_is_not_measured_for_long() -> None:
    machine = Machine(slow_s=10.0)
    found = machine.prober().measure(LIMITS, budget_s=1.0)
    assert len(machine.plans) == 3, "a prompt, a decode, the end"
    assert 0.5 < found.cost.costs.fixed_s / TRUE.fixed_s < 4


def test_results_of_other_ranks_are_waited_for() -> None:
    machine, sent = Machine(), list[RankReport]()

    class LastStage(LocalControl):
        def collect(self) -> list[RankReport]:
            reports, sent[:] = list(sent), []
            return reports

    class FirstStage:
        def execute(self, plan: IterationPlan) -> RankReport:
            report = machine.execute(plan)
            sent.append(replace(report, rank=1))
            return replace(report, result=None)

    found = Prober(LastStage(), FirstStage(), Idle(), clock=lambda: machine.now).measure(LIMITS)
    assert found.cost.costs.prefill_token_s == pytest.approx(TRUE.prefill_token_s, rel=0.1)


def test_a_lost_rank_ends_it() -> None:
    class Silent:
        def execute(self, plan: IterationPlan) -> RankReport:
            return RankReport(0, plan.plan_id, 0, 0)

    def lost() -> None:
        raise RankError("rank 1 is lost")

    with pytest.raises(RankError, match="rank 1 is lost"):
        Prober(LocalControl(), Silent(), Idle(), check_abort=lost).measure(LIMITS)


def kept(directory: Path) -> CostModel:
    cost = CostModel(TRUE)
    cost.relative_error = 0.04
    save(directory, SETTING, SHAPE, cost)
    return cost


def test_what_is_kept_is_found_again_for_the_same_setting_alone(tmp_path: Path) -> None:
    assert load(tmp_path / "calibration", SETTING) is None
    kept(tmp_path / "calibration")
    found = load(tmp_path / "calibration", SETTING)
    assert found is not None
    assert (found.costs, found.relative_error, found.num_observed) == (TRUE, 0.04, 0)
    for change in ({"model": "n"}, {"tp": 2}, {"pp": 2}, {"host": "i"}, {"version": "2"}, {"compute": "torch"}):
        other = msgspec.structs.replace(SETTING, **change)
        assert load(tmp_path / "calibration", other) is None
    assert [path.suffix for path in (tmp_path / "calibration").iterdir()] == [".json"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda _: "",
        lambda text: text[:50],
        lambda text: text.replace("fixed_s", "fixed"),
        lambda text: text.replace("0.005", "-1"),
        lambda text: text.replace('"m"', '"other"'),
    ],
)
def test_a_spoilt_file_is_measured_anew(tmp_path: Path, spoil: Callable[[str], str]) -> None:
    kept(tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(spoil(path.read_text()))
    assert load(tmp_path, SETTING) is None


def test_a_directory_that_cannot_be_written_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept(tmp_path / "file")
    assert load(tmp_path / "file", SETTING) is None


def test_the_newest_of_one_rank_on_this_host(tmp_path: Path) -> None:
    assert latest(tmp_path, "h") is None
    for change in ({"tp": 2}, {"host": "other"}):
        save(tmp_path, msgspec.structs.replace(SETTING, **change), SHAPE, CostModel())
    assert latest(tmp_path, "h") is None
    kept(tmp_path)
    (tmp_path / "broken.json").write_text("{")
    record = latest(tmp_path, "h")
    assert record is not None
    assert (costs_in(record), record.shape) == (TRUE, SHAPE)
