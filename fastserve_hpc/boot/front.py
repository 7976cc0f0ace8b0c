"""What only rank 0 has: the ingress, the coordinator, the stop signals, and a batch file's runner."""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import threading
import time
from types import TracebackType

from fastserve_hpc.boot.batch_process import BatchProcess
from fastserve_hpc.boot.costs import KnownCosts
from fastserve_hpc.boot.models import ServedModel
from fastserve_hpc.boot.workers import BuiltWorker, build_worker
from fastserve_hpc.boot.world import World
from fastserve_hpc.config import EngineConfig, ServerConfig
from fastserve_hpc.core.cost import CostModel
from fastserve_hpc.core.kv_manager import KvManager
from fastserve_hpc.core.kv_policy import KV_POLICIES
from fastserve_hpc.core.policy import make_policy
from fastserve_hpc.core.policy.base import Policy
from fastserve_hpc.core.policy.by_class import ByClass
from fastserve_hpc.core.policy.sizing import SkipJoinRules
from fastserve_hpc.core.scheduler import Scheduler
from fastserve_hpc.endpoint import Endpoint, endpoints_dir, file_of
from fastserve_hpc.errors import ExitCode, StoppedError
from fastserve_hpc.parallel.control import Control
from fastserve_hpc.parallel.idle import Backoff
from fastserve_hpc.parallel.signals import SignalThread, Stop
from fastserve_hpc.server.calibration import Calibrated
from fastserve_hpc.server.coordinator import Coordinator, EngineInfo
from fastserve_hpc.server.ingress_process import IngressProcess, settings_from
from fastserve_hpc.server.job_end import JobEnd
from fastserve_hpc.slurm.environ import job_end_time
from fastserve_hpc.slurm.queue import kill_wait_s

_STOP_NOW_S = 2.0
"""How long the end may take once it was asked for at once."""

_SHARE_OF_KILL_WAIT = 0.75
"""Of the time between Slurm's SIGTERM and SIGKILL, for requests that run; the rest is for the end itself."""


class Front:
    """A context: the ingress process lives inside it."""

    def __init__(
        self, engine: EngineConfig, server: ServerConfig, model: ServedModel, batch_args: list[str] | None
    ) -> None:
        if batch_args is not None:
            server = dataclasses.replace(server, endpoint=f"batch-{os.uname().nodename[:40]}-{os.getpid()}", tcp=False)
        self._engine = engine
        self._server = server
        self._model = model
        self._batch = None if batch_args is None else BatchProcess(batch_args)
        path = None if model.weights is None else str(model.weights.files.path)
        self._ingress = IngressProcess(settings_from(engine, server, model.limits, model=model.name, model_path=path))

    def __enter__(self) -> Front:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ingress.close()

    def run(self, world: World) -> ExitCode:
        """Bring the ranks up, serve until the end, and let them go."""
        stops = _Stops(world, self._batch, kill_wait_s(os.environ))
        SignalThread(stops.take).start()
        control = world.control()
        endpoint = self._ingress.wait_started()  # a name that is taken shows before the weights are loaded
        with world.loading(self._server.heartbeat_s):
            built = build_worker(self._engine, self._model, world)
            costs = KnownCosts(self._engine, self._model, built)
            calibrated = costs.begin(control, world)
        coordinator = self._coordinator(world, control, built, calibrated)
        built.comm.set_progress_hook(coordinator.progress)
        stops.direct_to(coordinator)
        gc.freeze()  # what is here now stays: collections need not look at it
        coordinator.run(on_ready=lambda: self._announce(endpoint, coordinator))
        costs.keep(calibrated.cost)
        built.comm.close()
        control.close()
        return self._exit_code(coordinator)

    def _coordinator(self, world: World, control: Control, built: BuiltWorker, calibrated: Calibrated) -> Coordinator:
        engine, cost = self._engine, calibrated.cost
        kv = KvManager(
            built.num_blocks,
            engine.block_size,
            built.num_host_blocks,
            policy=KV_POLICIES[engine.kv_policy],
            salt=os.urandom(32) if engine.prefix_cache == "on" else None,
            copy_costs=built.copy_costs,
            block_bytes=built.block_bytes,
            last_plan_id=calibrated.last_plan_id,
        )
        scheduler = Scheduler(
            self._policy(cost),
            kv,
            max_batch=engine.max_batch,
            max_batch_tokens=engine.max_batch_tokens,
            num_stages=engine.pp,
            cost=cost,
            max_slowdown=math.inf if engine.batch_slowdown is None else engine.batch_slowdown,
            last_plan_id=calibrated.last_plan_id,
        )
        info = EngineInfo(self._model.name, built.max_model_len, engine.tp, engine.pp, self._model.limits.vocab_size)
        return Coordinator(
            scheduler,
            control,
            built.worker,
            self._ingress.queue,
            info,
            Backoff(),
            drain_s=self._server.drain_s,
            check_abort=world.check,
            say=world.say,
            job_end=self._job_end(cost),
        )

    def _job_end(self, cost: CostModel) -> JobEnd | None:
        end_time = job_end_time()
        if end_time is None:
            return None
        return JobEnd.after(end_time - time.time(), time.monotonic(), self._server.drain_s, cost)

    def _policy(self, cost: CostModel) -> Policy:
        engine = self._engine
        rules = SkipJoinRules().without(engine.rules_without)

        def one() -> Policy:
            return make_policy(engine.policy, max_batch=engine.max_batch, cost=cost, num_stages=engine.pp, rules=rules)

        return ByClass(one) if rules.uses_classes else one()

    def _announce(self, endpoint: Endpoint, coordinator: Coordinator) -> None:
        if self._batch is not None:
            self._batch.start(file_of(endpoint.name, endpoints_dir()), on_end=coordinator.request_drain)
            return
        status = coordinator.status()
        print(
            f"ready endpoint={endpoint.name} model={status.model} max_model_len={status.max_model_len} "
            f"ranks={status.world_size} kv_blocks={status.device_blocks.total} policy={status.policy}",
            flush=True,
        )

    def _exit_code(self, coordinator: Coordinator) -> ExitCode:
        if self._batch is not None:
            return self._batch.exit_code()
        return ExitCode.STOPPED_EARLY if coordinator.num_cancelled else ExitCode.DONE


class _Stops:
    """Turns stop signals into drains. Called in the signal thread, but for `direct_to`."""

    def __init__(self, world: World, batch: BatchProcess | None, kill_wait_s: float | None) -> None:
        self._world = world
        self._batch = batch
        self._soon_s = float("inf") if kill_wait_s is None else _SHARE_OF_KILL_WAIT * kill_wait_s
        self._coordinator: Coordinator | None = None
        self._lock = threading.Lock()
        self._is_stopping = False

    def direct_to(self, coordinator: Coordinator) -> None:
        """The coordinator is there: from now on it can drain."""
        with self._lock:
            self._coordinator = coordinator

    def take(self, stop: Stop) -> None:
        with self._lock:
            coordinator = self._coordinator
            if coordinator is None:
                self._world.abort(StoppedError("told to stop while starting"))
        if self._batch is not None:
            self._batch.terminate()
        elif stop is not Stop.NOW:
            coordinator.request_drain("finish", self._soon_s if stop is Stop.DRAIN_SOON else float("inf"))
        if stop is Stop.NOW:
            coordinator.request_drain("now")
            threading.Timer(_STOP_NOW_S, self._world.abort, [StoppedError("told to stop at once")]).start()
