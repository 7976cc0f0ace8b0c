"""What a rank knows about itself, as it tells rank 0: values only, so that judging them is a pure function."""

from __future__ import annotations

import msgspec

UNLIMITED = -1


class Gpu(msgspec.Struct, frozen=True):
    """A GPU that the rank may use, in the order that CUDA counts them."""

    uuid: str
    free_bytes: int


class ModelProbe(msgspec.Struct, frozen=True):
    """The model's files as this rank sees them."""

    path: str = ""
    fingerprint: str = ""
    """Equal where the files are."""
    error: str = ""
    seconds: float = 0.0


class LinkProbe(msgspec.Struct, frozen=True):
    """How a message to another rank and back went."""

    peer: int
    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    error: str = ""


class Limits(msgspec.Struct, frozen=True):
    """Resource limits; `UNLIMITED` for none."""

    open_files: int = UNLIMITED
    """The hard one: a process may raise itself up to it."""
    locked_bytes: int = UNLIMITED


class RankFacts(msgspec.Struct, frozen=True):
    """One rank. Fields have defaults, so that another version's facts can still be read."""

    rank: int
    host: str = ""
    host_key: str = ""
    """Equal on ranks of one machine."""
    world_size: int = 1
    announced: int = 1
    """Ranks that the launcher says it has started; 0 if it does not say."""
    settings: dict[str, str] = {}
    """What it was started with, by option."""
    versions: dict[str, str] = {}
    """Of what must be the same everywhere, by name."""
    model: ModelProbe | None = None
    """None for a model without files."""
    cores: list[int] = []
    """That this rank may run on."""
    host_cores: int = 1
    free_bytes: int = 0
    """Host memory that it may still take."""
    shm_bytes: int = 0
    """Room in /dev/shm."""
    gpus: list[Gpu] = []
    gpu_error: str = ""
    torch_has_cuda: bool = False
    limits: Limits = Limits()
    has_infiniband: bool = False
    links: list[LinkProbe] = []
    all_reduce_s: float | None = None
    """In the tensor-parallel group."""
