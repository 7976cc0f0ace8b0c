"""Issue 3's Shows about families: each equals transformers, on one rank and on several."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from models.families import TINY, VOCAB
from models.harness import oracle_choices, oracle_logits
from safetensors.torch import load_file
from support import MPIEXEC, REPOSITORY

pytestmark = pytest.mark.mpi

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
        questions = {"prompts": prompts, "num_tokens": NUM_TOKENS}
        (directory / "questions.json").write_text(json.dumps(questions))
    _run_ranks([case.directory for case in written.values()])
    return written


def _run_ranks(directories: list[Path]) -> None:
    paths = (REPOSITORY, REPOSITORY / "kernels", REPOSITORY / "tests")
    result = subprocess.run(
        [MPIEXEC, "-n", "4", sys.executable, REPOSITORY / "tests/mpi/ranks/families.py", *directories],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=110,
        env={**os.environ, "PYTHONPATH": ":".join(map(str, paths)), "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", TINY)
def test_show_1_families_equal_transformers(cases: dict[str, Case], name: str, layout: str) -> None:
    tp_size, num_stages = LAYOUTS[layout]
    if tp_size > TINY[name].max_tp:
        pytest.skip("its heads cannot be shared by so many")
    cases[name].check((tp_size, num_stages))
