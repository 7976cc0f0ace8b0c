"""The C structs of cpu/abi.h, field by field."""

from __future__ import annotations

import ctypes
from enum import IntEnum

POINTER = ctypes.c_void_p
INT64 = ctypes.c_int64
INT32 = ctypes.c_int32
FLOAT = ctypes.c_float


class Activation(IntEnum):
    """What a linear applies to its output; the two gated ones take a weight packed with `up`."""

    NONE = 0
    RELU = 1
    SILU_MUL = 2
    GELU_TANH_MUL = 3


class PackArgs(ctypes.Structure):
    _fields_ = [
        *((name, POINTER) for name in ("rows", "packed")),
        *((name, INT64) for name in ("ld_rows", "first", "num_rows", "k", "per_panel", "lane")),
    ]


class LinearArgs(ctypes.Structure):
    _fields_ = [
        *((name, POINTER) for name in ("x", "weight", "bias", "norm_weight", "residual", "out")),
        *((name, INT64) for name in ("ld_x", "ld_residual", "ld_out", "rows", "k", "n")),
        ("eps", FLOAT),
        ("activation", INT32),
        ("out_is_float", INT32),
    ]


class KvView(ctypes.Structure):
    _fields_ = [
        ("data", POINTER),
        *(
            (name, INT64)
            for name in ("block_stride", "v_offset", "head_stride", "block_size", "num_kv_heads", "head_dim")
        ),
    ]


class AttentionArgs(ctypes.Structure):
    _fields_ = [
        ("kv", KvView),
        *((name, POINTER) for name in ("q", "out", "block_tables", "query_start", "seq_lens")),
        *((name, INT64) for name in ("ld_q", "ld_out", "ld_tables", "num_sequences", "num_heads")),
        ("scale", FLOAT),
        ("softcap", FLOAT),
        ("window", INT64),
    ]


class RopeStoreArgs(ctypes.Structure):
    _fields_ = [
        ("kv", KvView),
        *((name, POINTER) for name in ("q", "k", "v", "cos", "sin", "q_norm", "k_norm", "positions", "slots")),
        *((name, INT64) for name in ("ld_q", "ld_k", "ld_v", "num_tokens", "num_heads")),
        ("norm_eps", FLOAT),
    ]


class RmsNormArgs(ctypes.Structure):
    _fields_ = [
        *((name, POINTER) for name in ("x", "residual", "weight", "out")),
        *((name, INT64) for name in ("ld_x", "ld_residual", "ld_out", "rows", "n")),
        ("eps", FLOAT),
    ]


class GateMulArgs(ctypes.Structure):
    _fields_ = [
        *((name, POINTER) for name in ("gate", "up", "out")),
        *((name, INT64) for name in ("ld_gate", "ld_up", "ld_out", "rows", "n")),
        ("activation", INT32),
    ]


class EmbeddingArgs(ctypes.Structure):
    _fields_ = [
        *((name, POINTER) for name in ("table", "ids", "out")),
        *((name, INT64) for name in ("ld_table", "ld_out", "first_id", "num_rows", "num_ids", "n")),
        ("scale", FLOAT),
    ]


class ArgmaxArgs(ctypes.Structure):
    _fields_ = [("x", POINTER), ("out", POINTER), ("ld_x", INT64), ("rows", INT64), ("n", INT64)]


class CopyBlocksArgs(ctypes.Structure):
    _fields_ = [
        *((name, POINTER) for name in ("source", "target", "pairs")),
        ("block_bytes", INT64),
        ("num_pairs", INT64),
    ]


class SharedGroupState(ctypes.Structure):
    _fields_ = [
        ("segment", POINTER),
        *((name, INT64) for name in ("rank", "num_ranks", "slot_bytes")),
        ("num_arrivals", ctypes.c_uint32),
        ("num_calls", ctypes.c_uint32),
        ("num_looks", INT64),
    ]


class AllReduceArgs(ctypes.Structure):
    _fields_ = [("group", ctypes.POINTER(SharedGroupState)), ("x", POINTER), ("n", INT64), ("is_float", INT32)]


class AllGatherArgs(ctypes.Structure):
    _fields_ = [
        ("group", ctypes.POINTER(SharedGroupState)),
        ("x", POINTER),
        ("out", POINTER),
        ("rows", INT64),
        ("row_bytes", INT64),
    ]


class DecoderLayerArgs(ctypes.Structure):
    _fields_ = [
        *((name, POINTER) for name in ("input_norm", "mlp_norm", "attention_out_norm", "mlp_out_norm")),
        *((name, POINTER) for name in ("q_norm", "k_norm", "qkv", "out", "gate_up", "down")),
        *((name, POINTER) for name in ("qkv_bias", "out_bias", "gate_up_bias", "down_bias", "cos", "sin")),
        ("window", INT64),
    ]


class DecoderArgs(ctypes.Structure):
    _fields_ = [
        ("kv", KvView),
        ("layers", ctypes.POINTER(DecoderLayerArgs)),
        ("group", ctypes.POINTER(SharedGroupState)),
        *((name, POINTER) for name in ("hidden", "positions", "slots", "block_tables", "query_start", "seq_lens")),
        *((name, INT64) for name in ("ld_hidden", "ld_tables", "num_tokens", "num_sequences", "num_layers")),
        *((name, INT64) for name in ("kv_layer_stride", "hidden_size", "intermediate_size", "num_heads")),
        *((name, FLOAT) for name in ("norm_eps", "scale", "softcap")),
        ("activation", INT32),
    ]


OPERATIONS: tuple[tuple[str, type[ctypes.Structure]], ...] = (
    ("linear", LinearArgs),
    ("attention", AttentionArgs),
    ("rope_store", RopeStoreArgs),
    ("rms_norm", RmsNormArgs),
    ("gate_mul", GateMulArgs),
    ("embedding", EmbeddingArgs),
    ("argmax", ArgmaxArgs),
    ("copy_blocks", CopyBlocksArgs),
    ("all_reduce", AllReduceArgs),
    ("all_gather", AllGatherArgs),
    ("decoder", DecoderArgs),
)
"""In the order of the C table: name and arguments of each operation."""


class Ops(ctypes.Structure):
    """The table of one instruction set."""

    _fields_ = [
        ("isa", ctypes.c_char_p),
        ("dot_order", ctypes.c_char_p),
        *((f"{name}_args_size", INT64) for name, _ in OPERATIONS),
        *((name, POINTER) for name, _ in OPERATIONS),
    ]
