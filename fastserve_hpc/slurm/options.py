"""What can be said about a Slurm job: the options of `fastserve-hpc sbatch`, beside those of serve and batch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from fastserve_hpc.config import option
from fastserve_hpc.errors import ConfigError

MpiPlugin = Literal["auto", "pmi2", "pmix", "site"]
GpuRequest = Literal["gpus-per-node", "gres"]

_MOST_SIGNAL_S = 65535
_TIME = re.compile(r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SbatchConfig:
    """The allocation to ask for, and the quirks of a site."""

    time: str = option("01:00:00", "Time limit: minutes, HH:MM:SS, or D-HH:MM:SS.")
    nodes: int | None = option(None, "Nodes. Default: as few as hold the ranks.")
    partition: str | None = option(None, "Partition (queue).")
    account: str | None = option(None, "Account to charge.")
    qos: str | None = option(None, "Quality of service.")
    constraint: str | None = option(None, "Node features to require.")
    gpus_per_node: int = option(0, "GPUs that a node has and that are asked for; 0: run on CPUs.")
    gpu_type: str | None = option(None, "Kind of GPU, as the site calls it (a100).")
    gpu_memory: int | None = option(
        None, "Memory of one GPU, as in 80G: --tp and --pp are then chosen to fit, unless given.", size=True
    )
    gpu_request: GpuRequest = option("gpus-per-node", "How the site wants GPUs to be asked for.")
    cpus_per_task: int = option(8, "Cores for each rank.")
    mem: str | None = option(None, "Memory of a node, as in 64G. Default: computed on CPUs, the site's own with GPUs.")
    mpi: MpiPlugin = option("auto", "srun's --mpi. auto: what the installed MPI needs; site: leave it to the site.")
    env: str | None = option(None, "Shell file to source first: modules, paths. Default: this very installation.")
    job_name: str | None = option(None, "Name of the job. Default: fastserve-MODEL.")
    log: str = option("fastserve-%j.log", "Log file; %j is the job's id.")
    warn_s: int | None = option(
        None,
        "Seconds before the time limit at which no more is taken on. Default: 120, more for a long --drain-s.",
    )

    def __post_init__(self) -> None:
        if not _TIME.fullmatch(self.time):
            raise ConfigError(f"--time {self.time}: write minutes, HH:MM:SS or D-HH:MM:SS")
        for name, least in (("nodes", 1), ("gpus_per_node", 0), ("cpus_per_task", 1), ("warn_s", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: it must be at least {least}")
        if self.warn_s is not None and self.warn_s >= self.limit_s:
            raise ConfigError(f"--warn-s {self.warn_s} leaves nothing of --time {self.time}: it must be shorter")

    @property
    def limit_s(self) -> int:
        """The time limit in seconds."""
        days, _, clock = self.time.rpartition("-")
        parts = [int(part) for part in clock.split(":")]
        if days:
            hours, minutes, seconds = [*parts, 0, 0][:3]
        else:
            hours, minutes, seconds = ([0, *parts, 0] if len(parts) == 1 else [0, *parts])[-3:]
        return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds

    def signal_s(self, drain_s: float) -> int:
        """How long before the time limit Slurm is to warn: long enough to drain, within a quarter of the limit."""
        if self.warn_s is not None:
            return min(self.warn_s, _MOST_SIGNAL_S)
        return min(max(120, math.ceil(drain_s) + 60), self.limit_s // 4, _MOST_SIGNAL_S)
