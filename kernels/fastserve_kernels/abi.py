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
        *((name, POINTER) for name in ("weight", "up", "packed")),
        *((name, INT64) for name in ("ld_weight", "ld_up", "n", "k")),
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


OPERATIONS: tuple[tuple[str, type[ctypes.Structure]], ...] = (
    ("linear", LinearArgs),
    ("attention", AttentionArgs),
    ("rope_store", RopeStoreArgs),
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
