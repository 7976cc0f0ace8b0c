"""One rank's part of every iteration: it mirrors the coordinator's decisions and makes none."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Protocol

import torch

from fastserve_hpc.core.plan import IterationPlan, IterationResult, RankReport
from fastserve_hpc.parallel.topology import Topology
from fastserve_hpc.worker.batch import Batch, BatchBuilder
from fastserve_hpc.worker.kv_cache import KVCache
from fastserve_hpc.worker.memory_watch import MemoryWatch
from fastserve_hpc.worker.outputs import OutputReader
from fastserve_hpc.worker.sequences import PlanError, SequenceTable


class StageModel(Protocol):
    """One rank's part of a model (`models.decoder.Model`)."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def forward(self, batch: Batch, kv: KVCache, hidden: torch.Tensor | None) -> torch.Tensor:
        """Hidden states [T, hidden_size]; on the last stage logits [R, vocab_size] float32, of which ranks other than
        tp_rank 0 may have a part; or tokens [R] int64 where `batch.takes_most_likely`, -1 for what is not a number.

        `hidden` is the stage before's output, None on the first stage.
        """


class StageLink(Protocol):
    """The part of `TensorComm` that joins this rank to the stages beside it."""

    def send_next(self, x: torch.Tensor) -> None: ...

    def recv_prev(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> torch.Tensor: ...


class Worker:
    """Executes plans in order on one rank. `max_tokens` and `max_seqs` bound an iteration."""

    def __init__(
        self,
        model: StageModel,
        kv: KVCache,
        topology: Topology,
        comm: StageLink,
        memory: MemoryWatch,
        *,
        max_tokens: int,
        max_seqs: int,
        max_model_len: int,
    ):
        self._model = model
        self._kv = kv
        self._topology = topology
        self._comm = comm
        self._memory = memory
        self._table = SequenceTable(max_model_len, kv.shape.block_size, initial_rows=max_seqs)
        self._builder = BatchBuilder(self._table, max_tokens, max_seqs, kv.device_tier.device)
        self._outputs = OutputReader(self._table)
        self._last_plan_id = 0
        self._stall_s = 0.0

    def execute(self, plan: IterationPlan) -> RankReport:
        """Compute this rank's stage of a plan; the report has a result on the last stage's tp_rank 0.

        Raises `PlanError` where the plan does not fit what this rank knows.
        """
        if plan.plan_id != self._last_plan_id + 1:
            raise PlanError(f"plan {plan.plan_id} follows plan {self._last_plan_id}: one is missing or came twice")
        self._table.forget(plan.finished)
        self._outputs.forget(plan.finished)
        for new in plan.new_requests:
            self._table.add(new)
        self._kv.note_use(max((slot for piece in plan.slices for slot in piece.new_slots), default=-1))
        self._kv.copy(plan.copies)
        self._stall_s += self._kv.wait_for(plan.needs_copies)
        result = self._compute(plan) if plan.slices else IterationResult(plan.plan_id)
        self._last_plan_id = plan.plan_id
        return replace(self.report(), result=result if self._topology.reports_results else None)

    def report(self) -> RankReport:
        """Where this rank stands, without a result: copies done and memory change while it idles, too."""
        return RankReport(
            self._topology.rank,
            self._last_plan_id,
            self._kv.copies_done(),
            free_bytes=self._memory.free_bytes(),
            energy_j=self._memory.energy_j,
            stall_s=self._stall_s,
        )

    @torch.inference_mode()
    def _compute(self, plan: IterationPlan) -> IterationResult | None:
        batch = self._builder.build(plan)
        self._kv.clear(batch.begun_blocks)
        hidden = self._receive(batch)
        start = time.perf_counter()
        output = self._model.forward(batch, self._kv, hidden)
        if not self._topology.is_last_stage:
            self._comm.send_next(output)
        if not self._topology.reports_results:
            return None
        result = self._outputs.read(plan.plan_id, batch, output)
        return replace(result, compute_s=time.perf_counter() - start)

    def _receive(self, batch: Batch) -> torch.Tensor | None:
        if self._topology.is_first_stage:
            return None
        return self._comm.recv_prev(batch.num_tokens, self._model.hidden_size, self._model.dtype)
