"""The C++ kernels beside torch: `python benchmarks/kernels.py` prints the table of docs/kernels.md.

Both run on the same data and the same number of threads, in turns, so that a neighbour on the machine slows both;
the table has medians. Weights are those of 30 layers, so that they come from memory as in a model.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # read when torch is loaded: its threads, too, stop spinning soon

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

import numpy as np
import torch
from fastserve_kernels import KernelsUnavailableError, open_kernels, reference
from fastserve_kernels.abi import Activation
from fastserve_kernels.decoder import DecoderLayer, DecoderShape, DecoderStack
from fastserve_kernels.kernels import Kernels
from torch import Tensor

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, LAYERS = 576, 1536, 9, 3, 64, 49152, 30
"""SmolLM2-135M."""
Run = Callable[[], object]


@dataclass(frozen=True)
class Case:
    ours: Run
    torch: Run | None = None
    note: Callable[[float], str] = lambda _: ""


def random(*shape: int) -> Tensor:
    return (torch.randn(*shape) * 0.05).bfloat16()


def linears(kernels: Kernels, rows: int) -> Case:
    """The four linears of 30 layers, with norms, gate and residuals on our side and without on torch's."""
    shapes = {
        "qkv": (960, HIDDEN),
        "out": (HIDDEN, HIDDEN),
        "gate_up": (2 * INTERMEDIATE, HIDDEN),
        "down": (HIDDEN, INTERMEDIATE),
    }
    weights = [{name: random(*shape) for name, shape in shapes.items()} for _ in range(LAYERS)]
    packed = [
        {
            name: kernels.pack_linear(*w.chunk(2)[:1], up=w.chunk(2)[1])
            if name == "gate_up"
            else kernels.pack_linear(w)
            for name, w in layer.items()
        }
        for layer in weights
    ]
    x, wide, norm = random(rows, HIDDEN), random(rows, INTERMEDIATE), torch.ones(HIDDEN)

    def ours() -> None:
        for layer in packed:
            kernels.linear(x, layer["qkv"], norm_weight=norm, eps=1e-5)
            kernels.linear(x, layer["out"], residual=x)
            kernels.linear(x, layer["gate_up"], norm_weight=norm, eps=1e-5, activation=Activation.SILU_MUL)
            kernels.linear(wide, layer["down"], residual=x)

    def with_torch() -> None:
        for layer in weights:
            for name in ("qkv", "out", "gate_up"):
                torch.nn.functional.linear(x, layer[name])
            torch.nn.functional.linear(wide, layer["down"])

    work = 2 * rows * sum(n * k for n, k in shapes.values()) * LAYERS
    return Case(
        ours,
        with_torch,
        lambda s: f"{work / s / 1e9:.0f} GFLOP/s, {work / rows / s / 1e9:.0f} GB/s",
    )


def head(kernels: Kernels, rows: int) -> Case:
    weight, x = random(VOCABULARY, HIDDEN), random(rows, HIDDEN)
    packed = kernels.pack_linear(weight)
    return Case(
        lambda: kernels.linear(x, packed, out_dtype=torch.float32),
        lambda: torch.nn.functional.linear(x, weight),
        lambda s: f"{2 * VOCABULARY * HIDDEN / s / 1e9:.0f} GB/s",
    )


@dataclass(frozen=True)
class Paged:
    """Sequences in a cache with one layer."""

    sequences: int
    queries: int
    keys: int

    @property
    def blocks(self) -> int:
        return -(-self.keys // 16)

    def cache(self, layers: int = 1) -> Tensor:
        """Like the server's: numpy's zeros lie in huge pages, torch's do not."""
        shape = (self.sequences * self.blocks, layers, 2, KV_HEADS, 16, HEAD_DIM)
        return torch.from_numpy(np.zeros(shape, np.uint16)).view(torch.bfloat16)

    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        tables = torch.arange(self.sequences * self.blocks, dtype=torch.int32).view(self.sequences, -1)
        starts = torch.arange(self.sequences + 1, dtype=torch.int32) * self.queries
        return tables, starts, torch.full((self.sequences,), self.keys, dtype=torch.int32)

    def places(self) -> tuple[Tensor, Tensor]:
        positions = torch.arange(self.keys - self.queries, self.keys).repeat(self.sequences)
        slots = positions + torch.arange(self.sequences).repeat_interleave(self.queries) * self.blocks * 16
        return positions, slots


def attention(kernels: Kernels, batch: Paged) -> Case:
    """Against torch's SDPA on contiguous keys and values, which spares it the gathering."""
    kv, tables = batch.cache()[:, 0].normal_(), batch.tables()
    q = random(batch.sequences * batch.queries, HEADS * HEAD_DIM)
    shape = (batch.sequences, batch.keys, KV_HEADS, HEAD_DIM)
    k, v = random(*shape).transpose(1, 2), random(*shape).transpose(1, 2)
    split_q = q.view(batch.sequences, batch.queries, HEADS, HEAD_DIM).transpose(1, 2)
    causal = batch.queries > 1
    read = kv.numel() * 2
    return Case(
        lambda: kernels.paged_attention(q, kv, *tables, scale=0.125),
        lambda: torch.nn.functional.scaled_dot_product_attention(split_q, k, v, is_causal=causal, enable_gqa=True),
        lambda s: f"{read / s / 1e9:.0f} GB/s of KV",
    )


def norms(kernels: Kernels, rows: int) -> Case:
    x, weight = random(rows, HIDDEN), torch.ones(HIDDEN)
    return Case(lambda: kernels.rms_norm(x, weight, 1e-5), lambda: reference.rms_norm(x, weight, 1e-5))


def gates(kernels: Kernels, rows: int) -> Case:
    gate, up = random(rows, INTERMEDIATE), random(rows, INTERMEDIATE)
    return Case(lambda: kernels.gate_mul(gate, up), lambda: torch.nn.functional.silu(gate) * up)


def largest(kernels: Kernels, rows: int) -> Case:
    logits = torch.randn(rows, VOCABULARY)
    return Case(lambda: kernels.argmax(logits), lambda: logits.argmax(-1))


def decoder(kernels: Kernels, batch: Paged) -> Case:
    def layer() -> DecoderLayer:
        angles = torch.rand(4096, HEAD_DIM // 2)
        return DecoderLayer(
            input_norm=torch.ones(HIDDEN),
            qkv=kernels.pack_linear(random((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN)),
            out=kernels.pack_linear(random(HIDDEN, HIDDEN)),
            mlp_norm=torch.ones(HIDDEN),
            gate_up=kernels.pack_linear(random(INTERMEDIATE, HIDDEN), up=random(INTERMEDIATE, HIDDEN)),
            down=kernels.pack_linear(random(HIDDEN, INTERMEDIATE)),
            cos=angles.cos(),
            sin=angles.sin(),
        )

    stack = DecoderStack(
        [layer() for _ in range(LAYERS)], DecoderShape(HEADS, KV_HEADS, HEAD_DIM, 1e-5, HEAD_DIM**-0.5)
    )
    head = kernels.pack_linear(random(VOCABULARY, HIDDEN))
    norm, cache, hidden = torch.ones(HIDDEN), batch.cache(LAYERS), random(batch.sequences * batch.queries, HIDDEN)
    places, tables = batch.places(), batch.tables()

    def step() -> None:
        x = kernels.decoder_layers(stack, hidden.clone(), cache, *places, *tables)
        logits = kernels.linear(x[:: batch.queries], head, norm_weight=norm, eps=1e-5, out_dtype=torch.float32)
        kernels.argmax(logits)

    tokens = batch.sequences * batch.queries
    return Case(step, None, lambda s: f"{tokens / s:.0f} tokens/s")


def cases(kernels: Kernels) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Names, and what makes the data when a line's turn has come."""
    for rows in (1, 4, 16, 64, 256):
        yield f"linears of 30 layers, {rows} rows", partial(linears, kernels, rows)
    for rows in (1, 64):
        yield f"vocabulary head, {rows} rows", partial(head, kernels, rows)
    batches = {
        "decode, 1 x 256": Paged(1, 1, 256),
        "decode, 64 x 160": Paged(64, 1, 160),
        "decode, 64 x 512": Paged(64, 1, 512),
        "prompt, 16 x 128": Paged(16, 128, 128),
        "prompt, 1 x 2048": Paged(1, 2048, 2048),
    }
    for name, batch in batches.items():
        yield f"attention, {name}", partial(attention, kernels, batch)
    for name, make in (("rms_norm", norms), ("silu_mul", gates), ("argmax", largest)):
        yield f"{name}, 64 rows", partial(make, kernels, 64)
    models = {
        "decode, 1 x 192": Paged(1, 1, 192),
        "decode, 64 x 160": Paged(64, 1, 160),
        "prompt, 4 x 128": Paged(4, 128, 128),
    }
    for name, batch in models.items():
        yield f"whole model, {name}", partial(decoder, kernels, batch)


@contextmanager
def realtime(wanted: bool) -> Iterator[None]:
    """Gives this process's threads the cores, whoever else wants them, for as long as it lasts. Needs root."""

    def set_all(policy: int, priority: int) -> None:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), policy, os.sched_param(priority))

    if wanted:
        set_all(os.SCHED_FIFO, 1)
    try:
        yield
    finally:
        if wanted:
            set_all(os.SCHED_OTHER, 0)


def in_turns(runs: list[Run], seconds: float) -> list[float]:
    """Median seconds of each, after one run to warm up."""
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 5:
        for run, taken in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]


def main() -> int:
    parser = argparse.ArgumentParser(description="Time the C++ kernels beside torch.")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--isa", help="amx, avx512_bf16, avx512 or avx2; default: the best here")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each line of the table")
    parser.add_argument("--realtime", action="store_true", help="keep others off the cores while timing (as root)")
    parser.add_argument("--only", default="", help="lines whose name contains this")
    arguments = parser.parse_args()
    try:
        kernels = open_kernels(arguments.isa, arguments.threads)
    except KernelsUnavailableError as error:
        print(error, file=sys.stderr)
        return 1
    torch.set_num_threads(arguments.threads)
    print(f"{kernels.isa}, {arguments.threads} threads\n")
    print("| operation | ours, ms | torch, ms | ratio | ours |\n|---|---|---|---|---|")
    for name, make in cases(kernels):
        if arguments.only not in name:
            continue
        case = make()
        with realtime(arguments.realtime):
            ours, *others = in_turns([case.ours, *([case.torch] if case.torch else [])], arguments.seconds)
        theirs = f"{others[0] * 1e3:.3f} | {others[0] / ours:.1f}" if others else "- | -"
        print(f"| {name} | {ours * 1e3:.3f} | {theirs} | {case.note(ours)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
