"""Log-likelihoods of given texts by a batch file, as transformers computes them from the same model file."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import REPOSITORY, Server

from fastserve_hpc.models.locate import locate

NUM_CASES = 100

Case = tuple[list[int], int]
"""Token ids, and how many of them are the context."""


def oracle() -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = locate("smollm2-135m").path
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    return AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(
        **where
    )


def cases(tokenizer: Any) -> list[Case]:
    """Pieces of the documentation; every other one goes on with what the model itself finds likeliest."""
    text = (REPOSITORY / "docs" / "architecture.md").read_text()
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    rng = random.Random(5)
    starts = [rng.randrange(len(token_ids) - 60) for _ in range(NUM_CASES)]
    return [(token_ids[start : start + rng.randint(12, 60)], rng.randint(1, 10)) for start in starts]


def expected(model: Any, case: Case, use_likeliest: bool) -> tuple[list[int], float, bool]:
    """Token ids, log-likelihood of the continuation, is_greedy; with `use_likeliest` the continuation is one token."""
    token_ids, num_context = case
    with torch.inference_mode():
        scores = torch.log_softmax(model(torch.tensor([token_ids])).logits[0].double(), -1)
    if use_likeliest:
        token_ids = [*token_ids[:num_context], int(scores[num_context - 1].argmax())]
    picked = [(scores[i - 1], token_ids[i]) for i in range(num_context, len(token_ids))]
    return token_ids, float(sum(row[id] for row, id in picked)), all(int(row.argmax()) == id for row, id in picked)


def scored(body: dict[str, Any], num_context: int) -> tuple[float, bool]:
    logprobs = body["choices"][0]["logprobs"]
    values, tops = logprobs["token_logprobs"][num_context:], logprobs["top_logprobs"][num_context:]
    return sum(values), all(value == max(top.values()) for value, top in zip(values, tops, strict=True))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_log_likelihoods_and_is_greedy_are_those_of_transformers(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    settings = ("--dtype", "float32", "--max-model-len", "128", "--max-batch-tokens", "24")  # prompts go in chunks
    server = start_server("--model", "smollm2-135m", *settings)
    torch.set_num_threads(1)  # the server computes beside it, and threads that wait would spin
    model, tokenizer = oracle()
    asked = cases(tokenizer)
    wanted = [expected(model, case, use_likeliest=i % 2 == 0) for i, case in enumerate(asked)]
    ask = {"max_tokens": 0, "echo": True, "logprobs": 1}
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(json.dumps({"prompt": token_ids, **ask}) for token_ids, _, _ in wanted))
    server.wait_ready()
    files = ("--input", str(source), "--output", str(output), "--order", "input")
    result = server.run("batch", "--endpoint", "default", *files, timeout_s=300)
    assert result.returncode == 0, result.stderr
    records = [json.loads(line) for line in output.read_text().splitlines()]
    for record, (_, num_context), (token_ids, log_likelihood, is_greedy) in zip(records, asked, wanted, strict=True):
        found, found_greedy = scored(record["response"]["body"], num_context)
        assert len(record["response"]["body"]["choices"][0]["logprobs"]["tokens"]) == len(token_ids)
        assert found == pytest.approx(log_likelihood, abs=1e-3)
        assert found_greedy == is_greedy
    assert 40 <= sum(is_greedy for _, _, is_greedy in wanted) < NUM_CASES
