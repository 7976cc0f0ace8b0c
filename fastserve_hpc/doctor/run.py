"""The doctor's visit: every rank calls it at the same time, after MPI_Init and before anything that could hang."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from fastserve_hpc.config import EngineConfig
from fastserve_hpc.doctor.checks import examine
from fastserve_hpc.doctor.exchange import collect_facts, send_facts, send_findings
from fastserve_hpc.doctor.facts import RankFacts
from fastserve_hpc.doctor.finding import Finding, at_level
from fastserve_hpc.doctor.links import Deadline, Links, try_links
from fastserve_hpc.doctor.probes import (
    has_infiniband,
    host_name,
    probe_gpus,
    probe_limits,
    probe_model,
    probe_shm,
    probe_versions,
    torch_has_cuda,
)
from fastserve_hpc.errors import ConfigError, FastServeError
from fastserve_hpc.models.libraries import check_libraries
from fastserve_hpc.models.locate import locate
from fastserve_hpc.models.spec import ModelSpec, load_spec
from fastserve_hpc.parallel.addresses import host_key
from fastserve_hpc.parallel.mpi_init import finalize_mpi, world_size_from_env
from fastserve_hpc.parallel.topology import Topology
from fastserve_hpc.slurm.sizing import RankNeed, Workload, rank_need
from fastserve_hpc.worker.memory_watch import HostMemory

if TYPE_CHECKING:
    from fastserve_hpc.parallel.mpi_api import MPI

LINKS_S = 6.0
MODEL_S = 3.0
WORD_S = 12.0
"""From the start until when rank 0 waits for the others' facts. They wait a little longer for its findings."""
_VERDICT_S = 1.0

_RANK_0_FIRST_S = 1.0
_WITHOUT_FILES = ("fake",)


def run(
    world: MPI.Intracomm | None,
    engine: EngineConfig,
    environ: Mapping[str, str],
    spec: ModelSpec | None = None,
) -> list[Finding]:
    """Examine this rank and its links, and on rank 0 all ranks together; the findings, the same on all ranks.

    Collective, ends within 15 s whatever the others do. `world` None: no MPI, one rank. `spec` saves rank 0
    from reading the model's config again.
    """
    word = Deadline(WORD_S)
    verdict = Deadline(WORD_S + _VERDICT_S)
    rank, size = (0, 1) if world is None else (int(world.rank), int(world.size))
    fits = size == engine.world_size
    links = Links(()) if world is None or not fits else try_links(world, Topology(rank, engine.tp, engine.pp), LINKS_S)
    own = look(world, engine, environ, links)
    if world is not None and rank > 0:
        return send_facts(world, own, verdict)
    heard = [own] if world is None else collect_facts(world, own, word)
    facts = [one for one in heard if isinstance(one, RankFacts)]
    silent = [one for one in heard if isinstance(one, Finding)]
    need, unfit = _need(engine, spec, own)
    findings = [*silent, *examine(facts, engine, need), *unfit]
    if world is not None:
        send_findings(world, findings, [one.rank for one in facts if one.rank > 0], verdict)
    return findings


def raise_errors(findings: Sequence[Finding], world: MPI.Intracomm | None) -> None:
    """If there is an error, end MPI and raise `ConfigError` naming every one; a rank that rank 0 speaks for just exits.

    MPI is left as it is where a rank cannot be reached: its end would be waited for. Ranks other than 0 leave
    a moment later, because many launchers end all ranks with the first that fails.
    """
    errors = at_level(findings, "error")
    if not errors:
        return
    rank = 0 if world is None else world.rank
    if world is not None and not any(error.check == "links" for error in errors):
        finalize_mpi(world)
    if rank > 0:
        time.sleep(_RANK_0_FIRST_S)
        if not any(error.is_own for error in errors):
            raise SystemExit(int(ConfigError.exit_code))
    raise ConfigError("cannot start:\n" + "\n".join(f"  {error}" for error in errors))


def look(world: MPI.Intracomm | None, engine: EngineConfig, environ: Mapping[str, str], links: Links) -> RankFacts:
    """The facts of this rank."""
    gpus, gpu_error = probe_gpus(environ)
    return RankFacts(
        rank=0 if world is None else int(world.rank),
        host=host_name(),
        host_key=host_key(),
        world_size=1 if world is None else int(world.size),
        announced=world_size_from_env(environ),
        settings=_options(engine),
        versions=probe_versions(None if world is None else _mpi_library()),
        model=None if engine.model in _WITHOUT_FILES else probe_model(engine.model, MODEL_S),
        cores=sorted(os.sched_getaffinity(0)),
        host_cores=os.cpu_count() or 1,
        free_bytes=HostMemory()(),
        shm_bytes=probe_shm(),
        gpus=gpus,
        gpu_error=gpu_error,
        torch_has_cuda=bool(gpus) and torch_has_cuda(),
        limits=probe_limits(),
        has_infiniband=has_infiniband(),
        links=list(links.probes),
        all_reduce_s=links.all_reduce_s,
    )


def _options(engine: EngineConfig) -> dict[str, str]:
    """Settings as on the command line."""
    return {f"--{field.name.replace('_', '-')}": str(getattr(engine, field.name)) for field in fields(engine)}


def _mpi_library() -> str:
    from fastserve_hpc.parallel.mpi_api import MPI

    return " ".join(MPI.Get_library_version().split()[:3]).rstrip(",")


def _need(engine: EngineConfig, spec: ModelSpec | None, own: RankFacts) -> tuple[RankNeed | None, list[Finding]]:
    """What the model takes, and why this installation and these settings cannot serve it.

    Neither for a model without weights. That its files cannot be read is a finding of its own.
    """
    if own.model is None:
        return None, []
    try:
        check_libraries()
        if own.model.error:
            return None, []
        spec = spec or load_spec(locate(engine.model).path)
        spec.check_tp(engine.tp)
        spec.longest(engine.max_model_len)
        need = rank_need(spec, engine.tp, engine.pp, Workload(engine.dtype, engine.max_batch, engine.max_model_len))
    except FastServeError as error:
        return None, [Finding("error", "model", str(error))]
    return need, []
