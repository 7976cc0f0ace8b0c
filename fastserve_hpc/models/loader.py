"""From files to a rank's part of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch

from fastserve_hpc.models.decoder import DecoderLayer, Head, Model, layer_prefix
from fastserve_hpc.models.gguf import read_header
from fastserve_hpc.models.layers import Shard, VocabEmbedding, VocabHead, read_norm, read_vocabulary
from fastserve_hpc.models.locate import ModelFiles
from fastserve_hpc.models.reading import Reading
from fastserve_hpc.models.rope import rope_table
from fastserve_hpc.models.source_gguf import GGUFSource
from fastserve_hpc.models.source_safetensors import SafetensorsSource
from fastserve_hpc.models.spec import ModelSpec
from fastserve_hpc.models.weights import WeightReader, WeightSource
from fastserve_hpc.ops import Ops, reference
from fastserve_hpc.parallel.comm import TensorComm
from fastserve_hpc.parallel.topology import Topology

T = TypeVar("T")
Layer = TypeVar("Layer")

EMBEDDING = "model.embed_tokens"
NORM = "model.norm"
HEAD = "lm_head"


def load_model(
    files: ModelFiles,
    spec: ModelSpec,
    topology: Topology,
    comm: TensorComm,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    ops: Ops = reference,
    reading: Reading | None = None,
) -> Model:
    """Read this rank's part of the weights, in `dtype` on `device`; `ops` compute with them.

    `reading` is shared with the other ranks of the node.

    Raises `ModelError` for a tp that cannot share the heads and for missing, misshapen, left-over or cut-short
    tensors, naming file and key; `ConfigError` for more stages than layers.
    """
    spec.check_tp(topology.tp_size)
    indices = topology.layer_range(spec.num_layers)
    device = torch.device(device)
    reading = reading or Reading()
    reader = WeightReader(reading.of(open_source(files, spec)), dtype, device)
    shard = Shard(topology.tp_rank, topology.tp_size, ops, comm)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        ends = pool.submit(_load_ends, reader, shard, spec, topology)
        layers = _load_each(pool, partial(DecoderLayer, reader, shard, spec), indices, topology, reading)
        embedding, head = ends.result()
    reader.refuse_unread(layer_prefix(index) for index in indices)
    rope = rope_table(spec.rope, spec.head_dim, spec.max_position, reader.rope_factors(spec.head_dim), device)
    return Model(spec, dtype, shard, rope, layers, embedding, head)


def _load_each(
    pool: ThreadPoolExecutor,
    load: Callable[[T], Layer],
    sources: Sequence[T],
    topology: Topology,
    reading: Reading,
) -> list[Layer]:
    """Load all layers. The ranks of a stage begin at different ones, so that each reads another part of the files."""
    reading.expect(len(sources))
    first = len(sources) * topology.tp_rank // topology.tp_size
    order = [*range(first, len(sources)), *range(first)]

    def load_one(index: int) -> Layer:
        layer = load(sources[index])
        reading.finished_unit()
        return layer

    layers = dict(zip(order, pool.map(load_one, order), strict=True))
    return [layers[index] for index in range(len(sources))]


def open_source(files: ModelFiles, spec: ModelSpec) -> WeightSource:
    """The weights of a directory or a .gguf file."""
    if files.path.is_dir():
        return SafetensorsSource(files.path)
    return GGUFSource(read_header(files.path), spec)


def _load_ends(
    reader: WeightReader, shard: Shard, spec: ModelSpec, topology: Topology
) -> tuple[VocabEmbedding | None, Head | None]:
    """What the first stage has before the layers and the last one behind them. Tied ends share their weight."""
    shape = (spec.vocab_size, spec.hidden_size)
    table: Any = read_vocabulary(reader, shard, EMBEDDING, shape) if topology.is_first_stage else None
    head = None
    if topology.is_last_stage:
        if table is not None and spec.tie_embeddings:
            packed = table = shard.ops.pack_linear(table)
        else:
            name = EMBEDDING if spec.tie_embeddings else HEAD
            packed = shard.ops.pack_linear(read_vocabulary(reader, shard, name, shape))
        norm = read_norm(reader, NORM, spec.hidden_size, spec.norm_eps)
        head = Head(norm, VocabHead(shard, packed, spec.vocab_size))
    return None if table is None else VocabEmbedding(shard, table, spec.vocab_size), head
