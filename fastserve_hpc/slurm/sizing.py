"""How much memory a model needs on each rank, and how many ranks that makes: from the model's config alone.

Estimates for asking Slurm and for warnings; what the ranks really allocate is decided by the worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fastserve_hpc.errors import ConfigError
from fastserve_hpc.models.spec import ModelSpec
from fastserve_hpc.parallel.topology import Topology

GIB = 2**30
_USABLE = 0.9
"""Of a GPU's memory; drivers, libraries and fragmentation take the rest."""
_WORK_BYTES = 2 * GIB
"""Activations, communication buffers and the runtime itself, a rank."""
_TYPICAL_TOKENS = 1024
"""Prompt and answer of a usual request."""
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2}


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the ranks go. Stages are never split over nodes, and every node has the same number of ranks."""

    tp: int
    pp: int
    nodes: int

    @property
    def ranks(self) -> int:
        return self.tp * self.pp

    @property
    def ranks_per_node(self) -> int:
        return self.ranks // self.nodes


@dataclass(frozen=True, slots=True)
class RankNeed:
    """What the fullest rank of a layout needs."""

    weight_bytes: int
    kv_token_bytes: int
    """Of one token in the KV cache."""
    kv_tokens: int
    """That it should have room for: at least the longest request, and a usual batch."""

    @property
    def kv_bytes(self) -> int:
        return self.kv_token_bytes * self.kv_tokens

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + _WORK_BYTES

    def kv_room(self, memory_bytes: int) -> int:
        """Tokens that fit beside the weights into a GPU of so much memory."""
        room = int(memory_bytes * _USABLE) - self.weight_bytes - _WORK_BYTES
        return max(0, room // self.kv_token_bytes)


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked of the ranks."""

    dtype: str
    max_batch: int
    max_model_len: int | None

    def kv_tokens(self, spec: ModelSpec) -> int:
        longest = min(self.max_model_len or spec.max_position, spec.max_position)
        return max(longest, self.max_batch * min(longest, _TYPICAL_TOKENS))


def rank_need(spec: ModelSpec, tp: int, pp: int, workload: Workload) -> RankNeed:
    """The need of the fullest of tp * pp ranks."""
    stages = [Topology(stage * tp, tp, pp) for stage in range(pp)]
    element = _DTYPE_BYTES[workload.dtype]
    layers = max(len(stage.layer_range(spec.num_layers)) for stage in stages)
    kv_heads = -(-spec.num_kv_heads // tp)
    return RankNeed(
        weight_bytes=max(_stage_parameters(spec, stage) for stage in stages) * element // tp,
        kv_token_bytes=layers * 2 * kv_heads * spec.head_dim * element,
        kv_tokens=workload.kv_tokens(spec),
    )


def _stage_parameters(spec: ModelSpec, stage: Topology) -> int:
    count = len(stage.layer_range(spec.num_layers)) * _layer_parameters(spec)
    embedding = spec.vocab_size * spec.vocab_width
    projection = 0 if spec.embedding_size is None else spec.vocab_width * spec.hidden_size
    if stage.is_first_stage:
        count += embedding + projection
        count += spec.max_position * spec.hidden_size if spec.rope is None else 0
    if stage.is_last_stage:
        count += projection
        count += 0 if stage.is_first_stage and spec.tie_embeddings else embedding
    return count


def _layer_parameters(spec: ModelSpec) -> int:
    """Of attention and the MLP; norms and biases do not count here."""
    attention = 2 * spec.hidden_size * spec.head_dim * (spec.num_heads + spec.num_kv_heads)
    return attention + (3 if spec.is_gated else 2) * spec.hidden_size * spec.intermediate_size


def place(tp: int, pp: int, slots_per_node: int | None, nodes: int | None) -> Layout:
    """Spread tp * pp ranks over nodes with so many slots (GPUs; None: no limit). `nodes` None: as few as possible.

    Raises `ConfigError` where that would split a stage or leave nodes uneven.
    """
    slots = slots_per_node or tp * pp
    fitting = [n for n in range(1, pp + 1) if pp % n == 0 and pp // n * tp <= slots]
    if not fitting:
        raise ConfigError(
            f"--tp {tp}, but a node has {slots} GPUs and a stage stays on one node: use --tp {slots} or less"
        )
    if nodes is None:
        return Layout(tp, pp, fitting[0])
    if nodes not in fitting:
        choices = ", ".join(map(str, fitting))
        raise ConfigError(f"--nodes {nodes} cannot hold --tp {tp} x --pp {pp} evenly: use --nodes {choices}")
    return Layout(tp, pp, nodes)


def suggest(spec: ModelSpec, workload: Workload, memory_bytes: int, slots_per_node: int, nodes: int | None) -> Layout:
    """The smallest layout that holds the model and its KV cache: tensor parallel as far as a node goes, then stages.

    Raises `ConfigError` where none does.
    """
    for tp, pp in _splits(spec, slots_per_node, nodes or 1):
        need = rank_need(spec, tp, pp, workload)
        if need.kv_room(memory_bytes) >= need.kv_tokens:
            return place(tp, pp, slots_per_node, nodes)
    raise ConfigError(
        f"{spec.name} with {workload.kv_tokens(spec)} tokens of KV cache fits on no number of GPUs of "
        f"{gib(memory_bytes)}: lower --max-model-len or --max-batch, or check --gpu-memory and --nodes"
    )


def _splits(spec: ModelSpec, slots_per_node: int, nodes: int) -> Iterator[tuple[int, int]]:
    """(tp, pp) in the order in which they are worth trying; with one node, more are added a stage each."""
    tps = [tp for tp in spec.tp_sizes() if tp <= slots_per_node]
    yield from ((tp, nodes) for tp in tps if nodes <= spec.num_layers)
    for stages in range(2, spec.num_layers // nodes + 1):
        fitting = tps if nodes == 1 else [tp for tp in tps if tp * stages <= slots_per_node]
        yield from ((tp, stages * nodes) for tp in fitting[-1:])


def host_bytes(need: RankNeed, ranks: int) -> int:
    """Memory to ask for on a CPU node with so many ranks: weights, work and both tiers of the KV cache."""
    return ranks * (need.total_bytes + need.kv_bytes)


def gib(num_bytes: float) -> str:
    """As people read it: "15.0 GiB"."""
    return f"{num_bytes / GIB:.1f} GiB"
