"""From files to a rank's part of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from fastserve_hpc.models.decoder import DecoderLayer, Entrance, Head, LayerSource, Model
from fastserve_hpc.models.families import FAMILIES, HEAD
from fastserve_hpc.models.gguf import read_header
from fastserve_hpc.models.layers import Shard, VocabEmbedding, VocabHead, read_norm, vocabulary_rows
from fastserve_hpc.models.locate import ModelFiles
from fastserve_hpc.models.reading import Reading
from fastserve_hpc.models.rope import Ropes
from fastserve_hpc.models.source_directory import open_directory
from fastserve_hpc.models.source_gguf import GGUFSource
from fastserve_hpc.models.spec import ModelSpec
from fastserve_hpc.models.weights import Part, StoredRows, WeightReader, WeightSource
from fastserve_hpc.ops import Ops, reference
from fastserve_hpc.parallel.comm import TensorComm
from fastserve_hpc.parallel.topology import Topology

T = TypeVar("T")
Layer = TypeVar("Layer")

_OPT_POSITIONS_BEFORE = 2
"""Rows of a table of learned positions that stand before that of position 0."""


def load_model(
    files: ModelFiles,
    spec: ModelSpec,
    topology: Topology,
    comm: TensorComm,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    ops: Ops = reference,
    reading: Reading | None = None,
    max_len: int | None = None,
) -> Model:
    """Read this rank's part of the weights, in `dtype` on `device`; `ops` compute with them.

    `reading` is shared with the other ranks of the node. No position from `max_len` on will be asked for; None: from
    the model's last one on.

    Raises `ModelError` for a tp that cannot share the heads and for missing, misshapen, left-over or cut-short
    tensors, naming file and key; `ConfigError` for more stages than layers.
    """
    spec.check_tp(topology.tp_size)
    indices = topology.layer_range(spec.num_layers)
    device = torch.device(device)
    family = FAMILIES[spec.architecture]
    # What GGUF files hold has the offset in it.
    offset = family.norm_offset if files.path.is_dir() else 0.0
    reading = reading or Reading()
    reader = WeightReader(reading.of(open_source(files, spec)), dtype, device, offset)
    shard = Shard(topology.tp_rank, topology.tp_size, ops, comm)
    factors = reader.rope_factors(spec.head_dim)
    ropes = Ropes.make(spec, min(max_len or spec.max_position, spec.max_position), factors, device)
    sources = [LayerSource(reader, shard, spec, ropes, index) for index in indices]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        first, last = _start_ends(pool, reader, shard, spec, topology)
        layers = _load_each(pool, DecoderLayer, sources, topology, reading)
        entrance = None if first is None else _load_entrance(reader, shard, spec, first.result())
        head = None if last is None else _load_head(reader, shard, spec, last.result())
    reader.refuse_unread(family.tensors.layer(index) for index in indices)
    return Model(spec, dtype, shard, layers, entrance, head)


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
        return open_directory(files.path, FAMILIES[spec.architecture].tensors)
    return GGUFSource(read_header(files.path), spec)


def _start_ends(
    pool: ThreadPoolExecutor, reader: WeightReader, shard: Shard, spec: ModelSpec, topology: Topology
) -> tuple[Future[Any] | None, Future[Any] | None]:
    """Begins to load the matrices of the vocabulary, the first stage's and the last's. Tied, they are one."""
    embedding = FAMILIES[spec.architecture].tensors.embedding

    def rows(name: str) -> StoredRows:
        return vocabulary_rows(reader, shard, name, (spec.vocab_size, spec.vocab_width))

    def pack() -> Any:
        return shard.ops.pack_linear(rows(embedding if spec.tie_embeddings else HEAD))

    last = pool.submit(pack) if topology.is_last_stage else None
    if not topology.is_first_stage:
        return None, last
    if last is not None and spec.tie_embeddings:
        return last, last
    return pool.submit(lambda: rows(embedding).whole()), last


def _load_entrance(reader: WeightReader, shard: Shard, spec: ModelSpec, table: Any) -> Entrance:
    family = FAMILIES[spec.architecture]
    scale = torch.tensor(spec.hidden_size**0.5).to(reader.dtype).item() if family.scales_embedding else 1.0
    positions = None
    if family.tensors.positions is not None:
        rows = _OPT_POSITIONS_BEFORE + spec.max_position
        stored = Part.of(
            f"{family.tensors.positions}.weight", (rows, spec.hidden_size), range(_OPT_POSITIONS_BEFORE, rows)
        )
        positions = reader.read(stored)
    projection = _projection(reader, shard, spec, family.tensors.project_in, (spec.hidden_size, spec.vocab_width))
    return Entrance(shard.ops, VocabEmbedding(shard, table, spec.vocab_size, scale), projection, positions)


def _load_head(reader: WeightReader, shard: Shard, spec: ModelSpec, packed: Any) -> Head:
    family = FAMILIES[spec.architecture]
    norm = None
    if spec.final_norm:
        norm = read_norm(reader, family.tensors.final_norm, spec.hidden_size, spec.norm_eps, family.layer_norm)
    projection = _projection(reader, shard, spec, family.tensors.project_out, (spec.vocab_width, spec.hidden_size))
    return Head(shard.ops, norm, projection, VocabHead(shard, packed, spec.vocab_size, spec.logit_softcap))


def _projection(reader: WeightReader, shard: Shard, spec: ModelSpec, name: str, shape: tuple[int, int]) -> Any | None:
    """Between the sizes of the embedding and of the layers, whole on every rank; None where there is one size."""
    if spec.embedding_size is None:
        return None
    return shard.ops.pack_linear(reader.rows(Part.of(f"{name}.weight", shape)))
