"""From settings to scripts: what a serve job and a batch job ask Slurm for. Pure; `script.render` writes it down."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from fastserve_hpc.config import EngineConfig, ServerConfig
from fastserve_hpc.errors import ConfigError
from fastserve_hpc.models.spec import ModelSpec
from fastserve_hpc.slurm.options import SbatchConfig
from fastserve_hpc.slurm.script import Option, Script, Shard
from fastserve_hpc.slurm.sizing import (
    GIB,
    Layout,
    RankNeed,
    Workload,
    gib,
    host_bytes,
    place,
    rank_need,
    suggest,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """All settings of one Slurm job; what `fastserve-hpc sbatch` has gathered."""

    engine: EngineConfig
    server: ServerConfig
    slurm: SbatchConfig
    model_name: str
    spec: ModelSpec | None
    """None for a model without weights, which needs no memory to speak of."""
    layout_is_free: bool = False
    """Whether tp and pp are to be chosen, because nobody has set them."""
    program: tuple[str, ...] = ("fastserve-hpc",)
    """What starts it on a node."""
    mpi: str | None = "pmi2"
    """For srun's --mpi; None leaves it to the site."""
    sbatch_options: tuple[str, ...] = ()
    """Further ones, as "reservation=maintenance" or "exclusive"."""
    srun_options: tuple[str, ...] = ()


def serve_script(job: JobConfig) -> Script:
    """A server that runs until it is stopped or its time is over."""
    job = lay_out(job)
    return _script(job, "serve", settings_options(job.engine, job.server), _directives(job, job.slurm.log))


def batch_script(job: JobConfig, shards: Sequence[Shard], array_limit: int | None = None) -> Script:
    """A batch that starts again until all lines are done.

    Several shards make a job array, of which `array_limit` run at a time. Raises `ConfigError` where two would
    write to the same file.
    """
    job = lay_out(job)
    _check_outputs(shards)
    array = _array(len(shards), array_limit)
    log = job.slurm.log.replace("%j", "%A_%a") if array else job.slurm.log
    lines = [*_directives(job, log), *array, ("requeue", None), ("open-mode", "append")]
    options = [*settings_options(job.engine, job.server, without=("endpoint", "tcp")), ("resume", None)]
    return dataclasses.replace(_script(job, "batch", options, lines), shards=tuple(shards), restarts=True)


def _array(num_shards: int, limit: int | None) -> list[Option]:
    at_a_time = "" if limit is None else f"%{limit}"
    return [("array", f"0-{num_shards - 1}{at_a_time}")] if num_shards > 1 else []


def _script(job: JobConfig, command: str, options: Sequence[Option], directives: Sequence[Option]) -> Script:
    mpi = [] if job.mpi is None else [("mpi", job.mpi)]
    # Ranks of a stage are neighbours in number and must be so on the nodes.
    srun = [*mpi, ("distribution", "block"), *map(split_option, job.srun_options)]
    return Script(
        directives=tuple(directives),
        env_file=job.slurm.env,
        srun=tuple(srun),
        program=job.program,
        command=command,
        options=tuple(options),
        notes=tuple(_notes(job)),
    )


def lay_out(job: JobConfig) -> JobConfig:
    """The same with tp, pp and nodes decided. Raises `ConfigError` or `ModelError` where they cannot be."""
    layout = _layout(job)
    engine = dataclasses.replace(job.engine, tp=layout.tp, pp=layout.pp)
    return dataclasses.replace(job, engine=engine, slurm=dataclasses.replace(job.slurm, nodes=layout.nodes))


def _layout(job: JobConfig) -> Layout:
    slurm, engine = job.slurm, job.engine
    slots = slurm.gpus_per_node or None
    if job.spec is not None:
        if job.layout_is_free and slots and slurm.gpu_memory:
            return suggest(job.spec, workload(engine), slurm.gpu_memory, slots, slurm.nodes)
        job.spec.check_tp(engine.tp)
    return place(engine.tp, engine.pp, slots, slurm.nodes)


def workload(engine: EngineConfig) -> Workload:
    return Workload(engine.dtype, engine.max_batch, engine.max_model_len)


def _need(spec: ModelSpec, engine: EngineConfig) -> RankNeed:
    return rank_need(spec, engine.tp, engine.pp, workload(engine))


def _directives(job: JobConfig, log: str) -> list[Option]:
    slurm = job.slurm
    ranks_per_node = job.engine.world_size // (slurm.nodes or 1)
    wanted: dict[str, str | int | None] = {
        "job-name": slurm.job_name or f"fastserve-{re.sub(r'[^A-Za-z0-9._-]', '_', job.model_name)}",
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "time": slurm.time,
        "nodes": slurm.nodes,
        "ntasks-per-node": ranks_per_node,
        "cpus-per-task": slurm.cpus_per_task,
        **_gpus(slurm, ranks_per_node),
        "mem": slurm.mem or _memory(job, ranks_per_node),
        "signal": f"B:USR1@{slurm.signal_s(job.server.drain_s)}",
        "output": log,
    }
    further = [split_option(text) for text in job.sbatch_options]
    return [*((name, str(value)) for name, value in wanted.items() if value is not None), *further]


def _gpus(slurm: SbatchConfig, count: int) -> dict[str, str | int | None]:
    """All GPUs of a node are seen by all its ranks, which choose among them: that works with every way to ask."""
    if slurm.gpus_per_node == 0:
        return {}
    kind = f"{slurm.gpu_type}:" if slurm.gpu_type else ""
    if slurm.gpu_request == "gres":
        return {"gres": f"gpu:{kind}{count}"}
    return {"gpus-per-node": f"{kind}{count}"}


def _memory(job: JobConfig, ranks_per_node: int) -> str | None:
    if job.slurm.gpus_per_node or job.spec is None:
        return None
    return f"{-(-host_bytes(_need(job.spec, job.engine), ranks_per_node) // GIB)}G"


def _notes(job: JobConfig) -> Iterator[str]:
    if job.spec is None:
        return
    engine, memory = job.engine, job.slurm.gpu_memory
    need = _need(job.spec, engine)
    ranks = f"--tp {engine.tp} x --pp {engine.pp} = {_count(engine.world_size, 'rank')}"
    weights, kv = gib(need.weight_bytes), gib(need.kv_bytes)
    yield f"{job.model_name}: {ranks} on {_count(job.slurm.nodes or 1, 'node')}. The fullest rank holds {weights} of"
    yield f"weights; its KV cache takes {need.kv_token_bytes / 1024:.1f} KiB a token, {need.kv_tokens} tokens {kv}."
    if job.slurm.gpus_per_node and memory:
        yield f"A GPU of {gib(memory)} has room for about {need.kv_room(memory)} tokens beside the weights."
        if need.kv_room(memory) < need.kv_tokens:
            yield "That is less than the longest request or a usual batch needs: use more ranks."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def split_option(text: str) -> Option:
    """("reservation", "x") from "reservation=x", with or without leading dashes."""
    name, equals, value = text.lstrip("-").partition("=")
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name) or (equals and not value):
        raise ConfigError(
            f"{text!r} is no option: write NAME=VALUE, or NAME for a switch, as in --sbatch-option exclusive"
        )
    return name, value if equals else None


def settings_options(*settings: Any, without: Sequence[str] = ()) -> list[Option]:
    """The options that make these settings: those that are not at their default."""
    return [option for config in settings for option in _changed(config) if option[0] not in without]


def _changed(config: Any) -> Iterator[Option]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != field.default or field.name == "model":
            name = field.name.replace("_", "-")
            text = format_size(value) if field.metadata.get("size") else str(value)
            yield (name, None) if value is True else (name, text)


def format_size(num_bytes: int) -> str:
    """What `parse_size` reads back, as "512M"."""
    for unit, letter in ((2**40, "T"), (2**30, "G"), (2**20, "M"), (2**10, "K")):
        if num_bytes and num_bytes % unit == 0:
            return f"{num_bytes // unit}{letter}"
    return str(num_bytes)


def shards_of(inputs: Iterable[str], output_dir: str) -> list[Shard]:
    """Results of `in/part-1.jsonl` go to `OUTPUT_DIR/part-1.results.jsonl`."""
    return [Shard(path, str(PurePath(output_dir, f"{PurePath(path).stem}.results.jsonl"))) for path in inputs]


def _check_outputs(shards: Sequence[Shard]) -> None:
    first: dict[str, str] = {}
    for shard in shards:
        other = first.setdefault(shard.output, shard.input)
        if other != shard.input:
            raise ConfigError(f"{other} and {shard.input} would both write {shard.output}: rename one")
