"""What a run is told: frozen settings, their defaults and their help, each in one place.

The command line is made from these fields (`cli/options.py`); nothing else holds a default.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from fastserve_hpc.errors import ConfigError

DType = Literal["auto", "float32", "bfloat16", "float16"]
PolicyName = Literal["fcfs", "skip-join", "skip-join-paper", "mlfq"]
KvPolicyName = Literal["proactive", "reactive", "recompute", "defer"]
RULES = ("join", "sink", "replace", "spare", "finishing", "aging", "oldest", "hints", "classes", "sessions")
"""What --rules-off can name; docs/scheduling.md explains them."""

MAX_SIZE = 2**60
_MOST = 2**20
_DAY_S = 86400
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_size(text: str) -> int:
    """Bytes from "512M", "1.5G", "4096". Units are powers of 1024; a trailing "B" or "iB" is allowed."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if match is None:
        raise ConfigError(f"{text!r} is not a size: write a number with K, M, G or T, as in 512M")
    size = float(match[1]) * _UNITS[match[2].upper()]
    if size > MAX_SIZE:
        raise ConfigError(f"{text!r} is more than any memory: write a number with K, M, G or T, as in 512M")
    return int(size)


def option(default: Any, text: str, **extra: Any) -> Any:
    """A settings field with its help text; `extra` may hold `size=True`, `metavar` and `limits=(low, high)`.

    Every number has limits: the high ones keep slips of the keyboard from allocations and timers that would fail later.
    """
    return field(default=default, metadata={"help": text, **extra})


def check_limits(settings: Any) -> None:
    """Raise `ConfigError` naming the first number that is outside its field's limits."""
    for described in fields(settings):
        value = getattr(settings, described.name)
        if value is None or "limits" not in described.metadata:
            continue
        low, high = described.metadata["limits"]
        if not low <= value <= high:  # NaN is in no range
            name = described.name.replace("_", "-")
            raise ConfigError(f"--{name} {value}: it must be between {low} and {high}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The model, how it is split over ranks, and the limits of a batch."""

    model: str = option("smollm2-135m", "Hugging Face directory, .gguf file, or an alias (smollm2-135m).")
    tp: int = option(1, "Tensor-parallel ranks: each layer is split over so many ranks of one node.", limits=(1, 4096))
    pp: int = option(1, "Pipeline stages: the layers are split over so many groups of ranks.", limits=(1, 4096))
    dtype: DType = option(
        "auto", "Number type of weights and activations; auto: bfloat16 on GPUs and with the C++ kernels, else float32."
    )
    max_batch: int = option(64, "Requests that may run at the same time.", limits=(1, 65536))
    max_batch_tokens: int = option(
        512, "Tokens computed in one iteration; longer prompts are cut into chunks.", limits=(1, _MOST)
    )
    device_kv: int | None = option(
        None, "KV cache per rank on the device, as in 512M. Default: fits the memory.", size=True
    )
    host_kv: int | None = option(
        None, "KV cache per rank in host memory, as in 2G. Default: as much as the device's.", size=True
    )
    kv_policy: KvPolicyName = option(
        "proactive",
        "What becomes of KV when the device is full: proactive (moved to the host ahead of need), reactive (moved when "
        "needed), recompute (given up), defer (nobody is admitted whose KV does not fit).",
    )
    prefix_cache: Literal["on", "off"] = option(
        "on", "Keep the KV of prompts and answers for requests that begin alike."
    )
    block_size: int = option(16, "Tokens in one KV block.", limits=(1, 65536))
    max_model_len: int | None = option(
        None, "Longest prompt + answer in tokens. Default: the model's own limit.", limits=(2, 2**27)
    )
    seed: int = option(
        0, "Seeds the sampling of requests that bring no seed of their own.", limits=(-(2**63), 2**63 - 1)
    )
    policy: PolicyName = option(
        "skip-join",
        "Who runs first: skip-join (short answers first, nobody starves), fcfs (in order of arrival); "
        "mlfq and skip-join-paper are there for comparison.",
    )
    rules_off: str | None = option(
        None,
        f"Rules that skip-join goes without, for comparison, as in aging,hints: {', '.join(RULES)}.",
        metavar="RULE,...",
    )

    batch_slowdown: float | None = option(
        None,
        "Batch files may make interactive requests take at most so many times as long, whatever they ask for. "
        "Default: what each asks for.",
        metavar="S",
        limits=(1.0, 1000.0),
    )

    def __post_init__(self) -> None:
        check_limits(self)
        for name in self.rules_without:
            if name not in RULES:
                raise ConfigError(f"--rules-off {name}: there is no such rule; the rules are {', '.join(RULES)}")

    @property
    def rules_without(self) -> tuple[str, ...]:
        """The names that `rules_off` lists."""
        return tuple(name.strip() for name in (self.rules_off or "").split(",") if name.strip())

    @property
    def world_size(self) -> int:
        return self.tp * self.pp

    def check_world_size(self, world_size: int) -> None:
        """Raise `ConfigError` with the right `-n` where the launcher started another number of ranks."""
        if world_size != self.world_size:
            started = "1 rank was" if world_size == 1 else f"{world_size} ranks were"
            raise ConfigError(
                f"{started} started, but --tp {self.tp} x --pp {self.pp} = {self.world_size}: "
                f"start with -n {self.world_size}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The front door and the care for ranks."""

    endpoint: str | None = option(None, "Name that clients find this server by. Default: job-JOBID or default.")
    tcp: bool = option(False, "Listen on TCP too (CURVE keys in the endpoint file); always on under Slurm.")
    max_pending: int = option(
        4096, "Requests taken but not finished; more get a clear 'busy' reply.", limits=(1, _MOST)
    )
    lease_s: float = option(
        30.0, "Seconds without a sign of life after which a client's requests are cancelled.", limits=(0.1, _DAY_S)
    )
    heartbeat_s: float = option(
        10.0, "Seconds without a sign of life after which a rank counts as dead.", limits=(0.5, _DAY_S)
    )
    drain_s: float = option(
        25.0,
        "Seconds that running requests may take to finish once a drain was asked for.",
        limits=(0.1, 30 * _DAY_S),
    )

    def __post_init__(self) -> None:
        check_limits(self)
        if self.endpoint is not None:
            check_endpoint_name(self.endpoint)


def check_endpoint_name(name: str) -> None:
    """Raise `ConfigError` unless the name is safe as a file name."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise ConfigError(
            f"--endpoint {name!r}: use up to 64 letters, digits, '.', '_' and '-', starting with a letter or digit"
        )


def state_dir(environ: dict[str, str], home: Path) -> Path:
    """Where endpoint files lie: $FASTSERVE_HPC_HOME, else ~/.fastserve-hpc (on a shared file system)."""
    return Path(environ.get("FASTSERVE_HPC_HOME") or home / ".fastserve-hpc")
