"""Whole decoder layers in one call: the same bits as operation by operation, without Python in between."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fastserve_kernels.abi import Activation, DecoderArgs, DecoderLayerArgs, SharedGroupState
from fastserve_kernels.attention import cache_view
from fastserve_kernels.base import KernelBase, check, pointer
from fastserve_kernels.linear import GATED
from fastserve_kernels.packing import PackedLinear
from fastserve_kernels.shared import SharedGroup


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's weights, this rank's share. Norm weights are float32 vectors; None where the family has none.

    hidden += attention_out_norm(out(attention(rope(q_norm, k_norm(qkv(input_norm(hidden)))))))
    hidden += mlp_out_norm(down(activation(gate(mlp_norm(hidden))) * up(mlp_norm(hidden))))
    """

    input_norm: Tensor
    qkv: PackedLinear  # outputs: q, k, v
    out: PackedLinear
    mlp_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear
    cos: Tensor | None = None  # float32 [positions, head_dim / 2]
    sin: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    attention_out_norm: Tensor | None = None
    mlp_out_norm: Tensor | None = None
    window: int = 0


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """What the layers have in common; heads and sizes of this rank's share."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    scale: float
    softcap: float = 0.0
    activation: Activation = Activation.SILU_MUL


class DecoderStack:
    """Layers whose addresses C knows. `group`: the ranks that hold the other shares, None for one rank."""

    def __init__(self, layers: Sequence[DecoderLayer], shape: DecoderShape, group: SharedGroup | None = None) -> None:
        for layer in layers:
            _check_layer(layer, shape, layers[0])
        row_bytes = layers[0].qkv.num_inputs * 4
        check(group is None or row_bytes <= group.state.slot_bytes, f"a sum of {row_bytes} bytes has no room in a slot")
        self.layers = tuple(layers)
        self.shape = shape
        self.group = group
        self.args = (DecoderLayerArgs * len(layers))(*map(_layer_args, layers))


class DecoderKernels(KernelBase):
    """Layers of the Llama kind."""

    def decoder_layers(
        self,
        stack: DecoderStack,
        hidden: Tensor,
        cache: Tensor,
        positions: Tensor,
        slots: Tensor,
        block_tables: Tensor,
        query_start: Tensor,
        seq_lens: Tensor,
        *,
        first: int = 0,
        last: int | None = None,
    ) -> Tensor:
        """Runs layers first..last-1 on bf16 `hidden` [num_tokens, hidden_size], in place, and returns it.

        `cache`: the whole bf16 [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]; layer i of the stack
        uses cache[:, i]. The other arguments as for rope_store and paged_attention.
        """
        last = len(stack.layers) if last is None else last
        _check_call(stack, hidden, cache, range(first, last))
        batch = _BatchTensors(positions, slots, block_tables, query_start, seq_lens)
        batch.check()
        if first < last and hidden.shape[0]:
            self._run("decoder", _decoder_args(stack, hidden, cache, batch, range(first, last)))
        return hidden


class _BatchTensors(NamedTuple):
    """As `rope_store` and `paged_attention` take them."""

    positions: Tensor
    slots: Tensor
    block_tables: Tensor
    query_start: Tensor
    seq_lens: Tensor

    def check(self) -> None:
        check(self.positions.dtype == self.slots.dtype == torch.int64, "positions and slots must be int64")
        for tensor in (self.block_tables, self.query_start, self.seq_lens):
            check(tensor.dtype == torch.int32 and tensor.stride(-1) == 1, "tables and lengths must be int32 rows")

    @property
    def addresses(self) -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in self._asdict().items()}


def _check_call(stack: DecoderStack, hidden: Tensor, cache: Tensor, layers: range) -> None:
    shape = stack.shape
    check(0 <= layers.start <= layers.stop <= len(stack.layers), f"there are no layers {layers.start}..{layers.stop}")
    check(cache.dim() == 6 and cache.shape[1] >= layers.stop, "the cache must have a layer for each of the stack")
    check(cache.shape[3] == shape.num_kv_heads and cache.shape[5] == shape.head_dim, "the cache has other heads")
    check(hidden.dtype == torch.bfloat16 and hidden.stride(1) == 1, "hidden must be bf16 rows")
    check(hidden.shape[1] == stack.layers[0].qkv.num_inputs, "hidden must be [num_tokens, hidden_size]")


def _decoder_args(
    stack: DecoderStack, hidden: Tensor, cache: Tensor, batch: _BatchTensors, layers: range
) -> DecoderArgs:
    shape, layer, group = stack.shape, stack.layers[0], stack.group
    return DecoderArgs(
        kv=cache_view(cache[:, layers.start]),
        layers=ctypes.cast(ctypes.byref(stack.args[layers.start]), ctypes.POINTER(DecoderLayerArgs)),
        group=ctypes.pointer(group.state) if group else ctypes.POINTER(SharedGroupState)(),
        hidden=hidden.data_ptr(),
        **batch.addresses,
        ld_hidden=hidden.stride(0),
        ld_tables=batch.block_tables.stride(0),
        num_tokens=hidden.shape[0],
        num_sequences=batch.seq_lens.shape[0],
        num_layers=len(layers),
        kv_layer_stride=cache.stride(1),
        hidden_size=layer.qkv.num_inputs,
        intermediate_size=layer.gate_up.num_outputs,
        num_heads=shape.num_heads,
        norm_eps=shape.norm_eps,
        scale=shape.scale,
        softcap=shape.softcap,
        activation=shape.activation,
    )


def _check_layer(layer: DecoderLayer, shape: DecoderShape, model: DecoderLayer) -> None:
    hidden, attention = layer.qkv.num_inputs, shape.num_heads * shape.head_dim
    check(shape.activation in GATED and layer.gate_up.gated, "the MLP must be gated")
    check(layer.qkv.num_outputs == attention + 2 * shape.num_kv_heads * shape.head_dim, "qkv has other heads")
    check((layer.out.num_inputs, layer.out.num_outputs) == (attention, hidden), "out must be [hidden, attention]")
    check(layer.gate_up.num_inputs == layer.down.num_outputs == hidden, "the MLP must be on hidden_size")
    check(layer.down.num_inputs == layer.gate_up.num_outputs, "down must take what gate_up gives")
    check(hidden == model.qkv.num_inputs and layer.down.num_inputs == model.down.num_inputs, "layers differ in size")
    for norm in (layer.input_norm, layer.mlp_norm, layer.attention_out_norm, layer.mlp_out_norm):
        check(norm is None or (norm.dtype == torch.float32 and norm.shape == (hidden,)), "norms must be float32")
    for vector in (layer.q_norm, layer.k_norm):
        check(
            vector is None or (vector.dtype == torch.float32 and vector.shape == (shape.head_dim,)), "bad q or k norm"
        )
    for table in (layer.cos, layer.sin):
        check(table is None or (table.dtype == torch.float32 and table.is_contiguous()), "cos, sin must be float32")


def _layer_args(layer: DecoderLayer) -> DecoderLayerArgs:
    weights = {name: getattr(layer, name) for name in ("qkv", "out", "gate_up", "down")}
    vectors = ("input_norm", "mlp_norm", "attention_out_norm", "mlp_out_norm", "q_norm", "k_norm", "cos", "sin")
    return DecoderLayerArgs(
        **{name: weight.data.data_ptr() for name, weight in weights.items()},
        **{f"{name}_bias": pointer(weight.bias) for name, weight in weights.items()},
        **{name: pointer(getattr(layer, name)) for name in vectors},
        window=layer.window,
    )
