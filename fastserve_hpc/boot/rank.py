"""One rank from its start to its end."""

from __future__ import annotations

import os
from contextlib import ExitStack

from fastserve_hpc.boot.front import Front
from fastserve_hpc.boot.models import find_model
from fastserve_hpc.boot.workers import build_worker
from fastserve_hpc.boot.world import check_launch, is_first_rank, join_world
from fastserve_hpc.config import EngineConfig, ServerConfig
from fastserve_hpc.errors import ExitCode, FastServeError
from fastserve_hpc.models.spec import ModelSpec
from fastserve_hpc.parallel.signals import SignalThread, block_signals
from fastserve_hpc.worker import loop


def run_rank(engine: EngineConfig, server: ServerConfig, batch_args: list[str] | None) -> ExitCode:
    """Serve as whatever rank this process is; the exit code is the coordinator's, `DONE` on the other ranks."""
    block_signals()
    environ = dict(os.environ)
    try:
        check_launch(engine, environ)
    except FastServeError as error:
        if is_first_rank(environ):
            raise
        return ExitCode(error.exit_code)
    if is_first_rank(environ):
        return _run_first(engine, server, batch_args)
    with join_world(engine, server) as world:
        SignalThread(lambda _: None).start()  # rank 0 gets the same signals and drains for all
        control = world.worker_control()
        with world.loading(server.heartbeat_s):
            built = build_worker(engine, find_model(engine), world)
        loop.run(built.worker, control, world.backoff(), world.check)
        built.comm.close()
        control.close()
    return ExitCode.DONE


def _run_first(engine: EngineConfig, server: ServerConfig, batch_args: list[str] | None) -> ExitCode:
    """Rank 0. What fails before the ranks have met is raised once they have, so that it ends them all."""
    early: FastServeError | None = None
    spec: ModelSpec | None = None
    with ExitStack() as stack:
        try:
            model = find_model(engine)
            spec = None if model.weights is None else model.weights.spec
            front = stack.enter_context(Front(engine, server, model, batch_args))
        except FastServeError as error:
            if engine.world_size == 1:
                raise
            early = error
        with join_world(engine, server, spec) as world:
            if early is not None:
                raise early
            return front.run(world)
