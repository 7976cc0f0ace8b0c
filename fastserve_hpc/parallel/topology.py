"""Who is where: ranks, stages, tensor-parallel ranks and the layers of each stage. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from fastserve_hpc.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Topology:
    """The place of one rank in a world of `num_stages * tp_size`: `rank = stage * tp_size + tp_rank`.

    A stage's tensor-parallel ranks are neighbours, so that launchers that fill nodes in order keep them on one node.
    Raises `ValueError` where the numbers contradict each other.
    """

    rank: int = 0
    tp_size: int = 1
    num_stages: int = 1

    def __post_init__(self) -> None:
        if self.tp_size < 1 or self.num_stages < 1:
            raise ValueError(f"tp_size {self.tp_size} and num_stages {self.num_stages} must be at least 1")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is outside a world of {self.num_stages} x {self.tp_size} ranks")

    @property
    def world_size(self) -> int:
        return self.num_stages * self.tp_size

    @property
    def stage(self) -> int:
        return self.rank // self.tp_size

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def is_coordinator(self) -> bool:
        return self.rank == 0

    @property
    def reports_results(self) -> bool:
        """Whether this rank samples and reports iteration results: tp_rank 0 of the last stage."""
        return self.rank == self.result_rank

    @property
    def result_rank(self) -> int:
        return (self.num_stages - 1) * self.tp_size

    @property
    def previous_rank(self) -> int | None:
        """The same tp_rank of the stage before; None on the first stage."""
        return None if self.is_first_stage else self.rank - self.tp_size

    @property
    def next_rank(self) -> int | None:
        """The same tp_rank of the stage after; None on the last stage."""
        return None if self.is_last_stage else self.rank + self.tp_size

    @property
    def stage_ranks(self) -> range:
        """The ranks of this rank's stage, in tp_rank order."""
        return range(self.stage * self.tp_size, (self.stage + 1) * self.tp_size)

    def layer_range(self, num_layers: int) -> range:
        """The layers that this rank's stage computes.

        Left-over layers go to the middle stages: the last one has the output head, the first one the coordinator.
        Raises `ConfigError` where a stage would have no layer.
        """
        if num_layers < self.num_stages:
            raise ConfigError(
                f"--pp {self.num_stages}, but the model has {num_layers} layers: use --pp {num_layers} or less"
            )
        share, extra = divmod(num_layers, self.num_stages)
        first_larger = (self.num_stages - extra) // 2
        start = self.stage * share + min(max(self.stage - first_larger, 0), extra)
        is_larger = first_larger <= self.stage < first_larger + extra
        return range(start, start + share + int(is_larger))
