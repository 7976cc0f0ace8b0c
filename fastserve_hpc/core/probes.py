"""What is measured to learn an iteration's costs: made-up requests, and the plans that compute them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastserve_hpc.core.plan import IterationPlan, NewRequest, SequenceSlice
from fastserve_hpc.core.request import SamplingParams

# Sequences, positions before the slice, tokens of the slice. The first also warms up what is used first.
_SHAPES = ((1, 0, 64), (1, 16, 1), (16, 16, 1), (64, 16, 1), (4, 512, 1), (1, 0, 192), (1, 448, 64))
_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0, seed=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeLimits:
    """What the ranks can do."""

    max_batch: int
    max_batch_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int


@dataclass(frozen=True, slots=True)
class Probe:
    """An iteration of so many alike slices. What is before them is not computed: reading it takes as long."""

    num_sequences: int
    start: int
    num_tokens: int


def probes(limits: ProbeLimits) -> list[Probe]:
    """Prompt chunks and decodes of several sizes and contexts, as far as the limits let them; at least one each."""
    return list(dict.fromkeys(_fitted(*shape, limits) for shape in _SHAPES))


def _fitted(count: int, start: int, num_tokens: int, limits: ProbeLimits) -> Probe:
    room = min(limits.max_model_len - 1, limits.num_blocks * limits.block_size)
    num_tokens = max(1, min(num_tokens, limits.max_batch_tokens, room))
    blocks = -(-(start + num_tokens) // limits.block_size)
    count = max(1, min(count, limits.max_batch, limits.max_batch_tokens // num_tokens, limits.num_blocks // blocks))
    return Probe(count, max(0, min(start, room - num_tokens)), num_tokens)


class ProbePlans:
    """The plans of probes, numbered from 1. Their requests have ids below 0, which no other has."""

    def __init__(self, block_size: int):
        self.last_plan_id = 0
        self._block_size = block_size
        self._num_requests = 0
        self._live: tuple[int, ...] = ()

    def plan(self, probe: Probe) -> IterationPlan:
        """Computes the probe; the requests of the plan before are forgotten."""
        finished, ids = self._live, self._new_ids(probe.num_sequences)
        prompt = (0,) * (probe.start + probe.num_tokens)
        return self._next(finished, ids, prompt, tuple(self._slices(probe, ids)))

    def end(self) -> IterationPlan:
        """Computes nothing; all requests are forgotten."""
        finished, self._live = self._live, ()
        return self._next(finished)

    def _next(
        self,
        finished: tuple[int, ...],
        ids: Sequence[int] = (),
        prompt: tuple[int, ...] = (),
        slices: tuple[SequenceSlice, ...] = (),
    ) -> IterationPlan:
        self.last_plan_id += 1
        new = tuple(NewRequest(request_id, prompt, _SAMPLING, 0) for request_id in ids)
        return IterationPlan(self.last_plan_id, slices=slices, new_requests=new, finished=finished)

    def _new_ids(self, count: int) -> tuple[int, ...]:
        first = self._num_requests + 1
        self._num_requests += count
        self._live = tuple(-number for number in range(first, first + count))
        return self._live

    def _slices(self, probe: Probe, ids: Sequence[int]) -> list[SequenceSlice]:
        blocks = -(-(probe.start + probe.num_tokens) // self._block_size)
        return [
            SequenceSlice(
                request_id, probe.start, probe.num_tokens, 0, tuple(range(i * blocks, (i + 1) * blocks)), samples=True
            )
            for i, request_id in enumerate(ids)
        ]
