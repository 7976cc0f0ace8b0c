"""From files to a rank's part of a model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from fastserve_hpc import ops
from fastserve_hpc.config import DType
from fastserve_hpc.models.decoder import DecoderLayer, Head, Model, layer_prefix
from fastserve_hpc.models.gguf import read_header
from fastserve_hpc.models.layers import Shard, VocabEmbedding, VocabHead, read_norm, read_vocabulary
from fastserve_hpc.models.locate import ModelFiles
from fastserve_hpc.models.rope import rope_table
from fastserve_hpc.models.source_gguf import GGUFSource
from fastserve_hpc.models.source_safetensors import SafetensorsSource
from fastserve_hpc.models.spec import ModelSpec
from fastserve_hpc.models.weights import WeightReader, WeightSource
from fastserve_hpc.parallel.comm import TensorComm
from fastserve_hpc.parallel.topology import Topology

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
) -> Model:
    """Read this rank's part of the weights, in `dtype` on `device`.

    Raises `ModelError` for a tp that cannot share the heads and for missing, misshapen, left-over or cut-short
    tensors, naming file and key; `ConfigError` for more stages than layers.
    """
    spec.check_tp(topology.tp_size)
    indices = topology.layer_range(spec.num_layers)
    device = torch.device(device)
    reader = WeightReader(open_source(files, spec), dtype, device)
    shard = Shard(topology.tp_rank, topology.tp_size, ops.for_device(device), comm)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        ends = pool.submit(_load_ends, reader, shard, spec, topology)
        layers = list(pool.map(partial(DecoderLayer, reader, shard, spec), indices))
        embedding, head = ends.result()
    reader.refuse_unread(layer_prefix(index) for index in indices)
    rope = rope_table(spec.rope, spec.head_dim, spec.max_position, reader.rope_factors(spec.head_dim), device)
    return Model(spec, dtype, shard, rope, layers, embedding, head)


def open_source(files: ModelFiles, spec: ModelSpec) -> WeightSource:
    """The weights of a directory or a .gguf file."""
    if files.path.is_dir():
        return SafetensorsSource(files.path)
    return GGUFSource(read_header(files.path), spec)


def resolve_dtype(dtype: DType, device: torch.device | str = "cpu") -> torch.dtype:
    """What --dtype means on `device`: "auto" is bfloat16 where the processor multiplies it, float32 elsewhere."""
    if dtype != "auto":
        return _DTYPES[dtype]
    return torch.bfloat16 if _multiplies_bfloat16(torch.device(device)) else torch.float32


def _multiplies_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    try:
        words = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split()
    except OSError:
        return False
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(words)


def _load_ends(
    reader: WeightReader, shard: Shard, spec: ModelSpec, topology: Topology
) -> tuple[VocabEmbedding | None, Head | None]:
    """What the first stage has before the layers and the last one behind them. Tied ends share their weight."""
    shape = (spec.vocab_size, spec.hidden_size)
    embedding = VocabEmbedding(reader, shard, EMBEDDING, shape) if topology.is_first_stage else None
    if not topology.is_last_stage:
        return embedding, None
    if spec.tie_embeddings and embedding is not None:
        weight = embedding.weight
    else:
        weight = read_vocabulary(reader, shard, EMBEDDING if spec.tie_embeddings else HEAD, shape)
    norm = read_norm(reader, NORM, spec.hidden_size, spec.norm_eps)
    return embedding, Head(norm, VocabHead(shard, weight, spec.vocab_size))


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
