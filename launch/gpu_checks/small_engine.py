"""A random checkpoint, and scheduler and worker of one rank in this process to run it on any device."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from fastserve_hpc.core.kv_manager import KvManager
from fastserve_hpc.core.plan import IterationPlan, TokenDelta
from fastserve_hpc.core.policy.fcfs import Fcfs
from fastserve_hpc.core.request import Request, SamplingParams
from fastserve_hpc.core.scheduler import Scheduler
from fastserve_hpc.models.loader import load_model
from fastserve_hpc.models.locate import ModelFiles
from fastserve_hpc.models.spec import load_spec
from fastserve_hpc.ops import for_device
from fastserve_hpc.parallel.single import SingleComm
from fastserve_hpc.parallel.topology import Topology
from fastserve_hpc.worker.kv_cache import KVCache, KVShape, KVSize
from fastserve_hpc.worker.memory_watch import watch_host
from fastserve_hpc.worker.worker import Worker

Answer = list[tuple[int, float]]
"""(token id, its log-probability) of each token."""

SMALL = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 96,
         "num_hidden_layers": 3, "vocab_size": 131}  # fmt: skip
SMOLLM2 = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536,
           "num_hidden_layers": 30, "vocab_size": 49152}  # fmt: skip
_MAX_BATCH, _MAX_BATCH_TOKENS, _MAX_MODEL_LEN, _BLOCK_SIZE = 64, 512, 256, 16
_NUM_BLOCKS = _MAX_BATCH * _MAX_MODEL_LEN // _BLOCK_SIZE


def write_checkpoint(directory: Path, sizes: dict[str, int]) -> None:
    """A Llama of these sizes with random weights, as Hugging Face directories have it."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": True, "max_position_embeddings": _MAX_MODEL_LEN, **sizes,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    save_file(_random_weights(sizes), directory / "model.safetensors")


def _random_weights(sizes: dict[str, int]) -> dict[str, Tensor]:
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    kv = hidden * sizes["num_key_value_heads"] // sizes["num_attention_heads"]
    matrices = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    tensors = {"model.embed_tokens.weight": (sizes["vocab_size"], hidden)}
    for i in range(sizes["num_hidden_layers"]):
        tensors |= {f"model.layers.{i}.{name}.weight": shape for name, shape in matrices.items()}
    weights = {name: torch.randn(shape, generator=generator) / hidden**0.5 for name, shape in tensors.items()}
    norms = [f"model.layers.{i}.{n}" for i in range(sizes["num_hidden_layers"]) for n in _NORMS]
    return weights | {f"{name}.weight": torch.ones(hidden) for name in (*norms, "model.norm")}


_NORMS = ("input_layernorm", "post_attention_layernorm")


class SmallEngine:
    """Computes with the reference operations, as GPUs do."""

    def __init__(self, directory: Path, device: torch.device, dtype: torch.dtype) -> None:
        spec, comm = load_spec(directory), SingleComm()
        ops = for_device(device, "float32").ops
        model = load_model(ModelFiles(directory, "random"), spec, Topology(), comm, dtype, device, ops)
        cache = KVCache(KVShape.of(spec, Topology(), _BLOCK_SIZE, dtype), KVSize(_NUM_BLOCKS, 0), device)
        limits = {"max_tokens": _MAX_BATCH_TOKENS, "max_seqs": _MAX_BATCH, "max_model_len": _MAX_MODEL_LEN}
        self._worker = Worker(model, cache, Topology(), comm, watch_host(), **limits)
        self._scheduler = Scheduler(
            Fcfs(),
            KvManager(_NUM_BLOCKS, _BLOCK_SIZE),
            max_batch=_MAX_BATCH,
            max_batch_tokens=_MAX_BATCH_TOKENS,
            num_stages=1,
        )
        self._next_id = 1

    def answer(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Answer]:
        """Greedy."""
        answers: dict[int, Answer] = {self._add(prompt, num_tokens, logprobs=0): [] for prompt in prompts}
        while not self._scheduler.is_idle:
            for delta in self._step()[1]:
                answers[delta.request_id] += [(entry.token_id, entry.logprob) for entry in delta.logprobs]
        return list(answers.values())

    def rates(self, num_sequences: int, prompt: int, output: int) -> tuple[int, float, float]:
        """(sequences, prompt tokens a second, decoded tokens a second)."""
        for i in range(num_sequences):
            self._add([(i * 31 + j * 7) % 100 + 5 for j in range(prompt)], output, logprobs=None)
        seconds, tokens = {True: 0.0, False: 0.0}, {True: 0, False: 0}
        while not self._scheduler.is_idle:
            began = time.perf_counter()
            plan, _ = self._step()
            is_decode = all(piece.num_tokens == 1 for piece in plan.slices)
            seconds[is_decode] += time.perf_counter() - began
            tokens[is_decode] += plan.num_tokens
        prompt_rate, decode_rate = (tokens[kind] / max(seconds[kind], 1e-9) for kind in (False, True))
        return num_sequences, prompt_rate, decode_rate

    def _add(self, prompt: Sequence[int], num_tokens: int, logprobs: int | None) -> int:
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, seed=0, logprobs=logprobs, ignore_eos=True)
        self._scheduler.add(Request(self._next_id, tuple(prompt), sampling), 0.0)
        self._next_id += 1
        return self._next_id - 1

    def _step(self) -> tuple[IterationPlan, list[TokenDelta]]:
        plan = self._scheduler.schedule(0.0)
        assert plan is not None
        result = self._worker.execute(plan).result
        assert result is not None
        return plan, self._scheduler.update(result, 0.0)
