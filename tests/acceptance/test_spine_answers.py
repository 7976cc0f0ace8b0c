"""Shows 3 and 8: the right tokens, and sampling that can be relied on."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support import REPOSITORY, Server

from fastserve_hpc.client import AsyncClient, Client
from fastserve_hpc.errors import RequestError
from fastserve_hpc.models.locate import locate

NUM_PROMPTS, NUM_TOKENS = 20, 64
TIE = 1e-3
"""A first difference where the oracle's two best logits are closer than this is reported, not failed."""


@cache
def oracle() -> tuple[Any, Any]:
    """transformers' own loading of the same file, in fp32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = locate("smollm2-135m").path
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(**where)


def questions() -> list[str]:
    """The first prompts of MT-bench where they are at hand, else of the quickstart's own."""
    shared = REPOSITORY.parent / "shared" / "prompts" / "mt_bench_question.jsonl"
    if shared.exists():
        lines = [json.loads(line)["turns"][0] for line in shared.read_text().splitlines()]
    else:
        own = (REPOSITORY / "launch" / "prompts.jsonl").read_text().splitlines()
        chats = [json.loads(line)["body"].get("messages") for line in own]
        lines = [messages[-1]["content"] for messages in chats if messages]
    return lines[:NUM_PROMPTS]


@cache
def prompts() -> list[list[int]]:
    tokenizer = oracle()[1]
    chats = [[{"role": "user", "content": q}] for q in questions()]
    texts = [tokenizer.apply_chat_template(c, add_generation_prompt=True, tokenize=False) for c in chats]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def first_difference(prompt: list[int], answer: list[int]) -> tuple[int, float] | None:
    """Where greedy decoding by the oracle leaves `answer`, and how close its two best logits are there."""
    with torch.inference_mode():
        logits = oracle()[0](torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
    for position, token_id in enumerate(answer):
        best = torch.topk(logits[position], 2)
        if best.indices[0] != token_id:
            return position, float(best.values[0] - best.values[1])
    return None


async def _answers(endpoint: Path) -> list[list[int]]:
    async with AsyncClient(endpoint) as client:
        asked = [client.generate(prompt, max_tokens=NUM_TOKENS, ignore_eos=True) for prompt in prompts()]
        return [result.token_ids for result in await asyncio.gather(*asked)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.mpi)])
def test_show_3_greedy_ids_equal_transformers(start_server: Callable[..., Server], ranks: int) -> None:
    server = start_server("--dtype", "float32", "--pp", str(ranks), ranks=ranks).wait_ready()
    answers = asyncio.run(_answers(server.endpoint_file()))
    assert [len(a) for a in answers] == [NUM_TOKENS] * NUM_PROMPTS
    for index, (prompt, answer) in enumerate(zip(prompts(), answers, strict=True)):
        difference = first_difference(prompt, answer)
        if difference is not None:
            print(
                f"prompt {index}: differs at token {difference[0]}, the two best logits are {difference[1]:.2e} apart"
            )
            assert difference[1] < TIE


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(tmp_path_factory.mktemp("home"), ["--dtype", "float32"])
    yield started.wait_ready()
    started.close()


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.endpoint_file()) as connected:
        yield connected


def test_chat_messages_give_the_prompt_of_the_template(client: Client) -> None:
    result = client.generate([{"role": "user", "content": "What is the capital of France?"}], max_tokens=24)
    assert "Paris" in result.text
    assert result.finish_reason in ("stop", "length")


SEVERAL = {"max_tokens": 16, "n": 4, "seed": 7, "temperature": 1.0}


def test_show_8_four_choices_differ_and_come_again(client: Client) -> None:
    first = client.generate("The most surprising thing about", **SEVERAL)
    assert len({tuple(c.token_ids) for c in first.choices}) == 4
    again = client.generate("The most surprising thing about", **SEVERAL)
    assert [c.token_ids for c in again.choices] == [c.token_ids for c in first.choices]


def test_show_8_the_same_four_in_any_batch(server: Server, client: Client) -> None:
    alone = client.generate("The most surprising thing about", **SEVERAL)
    with Client(server.endpoint_file()) as other:
        crowd = [other.stream(f"{i} is a number", max_tokens=64, ignore_eos=True) for i in range(7)]
        for stream in crowd:
            next(stream)
        among_others = client.generate("The most surprising thing about", **SEVERAL)
        for stream in crowd:
            stream.close()
    assert [c.token_ids for c in among_others.choices] == [c.token_ids for c in alone.choices]


@pytest.mark.parametrize("extreme", [{"temperature": 1e-4}, {"temperature": 1.0, "top_p": 1e-4}, {"top_k": 10**9}])
def test_show_8_extremes_behave(client: Client, extreme: dict[str, float]) -> None:
    greedy = client.generate("One, two, three,", max_tokens=12)
    assert client.generate("One, two, three,", max_tokens=12, seed=3, **extreme).token_ids == greedy.token_ids


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": math.nan}, "top_p"),
        ({"top_p": -0.5}, "top_p"),
        ({"top_k": -3}, "top_k"),
        ({"repetition_penalty": -1.0}, "repetition_penalty"),
        ({"logit_bias": {5: math.nan}}, "logit_bias"),
        ({"max_tokens": -4}, "max_tokens"),
    ],
)
def test_show_8_nonsense_is_refused_by_name(client: Client, params: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        client.generate("hello", **params)


@pytest.mark.parametrize("token_id", [-1, 49152, 2**62, 2**63])
def test_show_8_ids_outside_the_vocabulary_are_refused(client: Client, token_id: int) -> None:
    with pytest.raises(RequestError, match=r"49151|token id|integer"):
        client.generate([5, token_id], max_tokens=4)


@pytest.mark.parametrize("prompt", ["", []])
def test_show_8_an_empty_prompt_is_refused(client: Client, prompt: str | list[int]) -> None:
    with pytest.raises(RequestError, match="empty"):
        client.generate(prompt, max_tokens=4)


def test_show_8_a_prompt_over_the_context_is_refused_with_the_numbers(client: Client) -> None:
    with pytest.raises(RequestError, match="8192"):
        client.generate([5] * 9000, max_tokens=4)


def test_show_8_the_server_lives_after_all_that(client: Client, server: Server) -> None:
    assert len(client.generate("hello", max_tokens=4, ignore_eos=True).token_ids) == 4
    assert server.process.poll() is None


def test_stop_strings_end_the_text_before_them(client: Client) -> None:
    plain = client.generate("One, two, three,", max_tokens=24, ignore_eos=True).text
    stop = plain[10:13]
    stopped = client.generate("One, two, three,", max_tokens=24, ignore_eos=True, stop=(stop,))
    assert stopped.text == plain[: plain.index(stop)]
    assert stopped.finish_reason == "stop"


def test_logprobs_are_those_of_the_oracle(client: Client) -> None:
    prompt = prompts()[0][:24]
    result = client.generate(prompt, max_tokens=4, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    with torch.inference_mode():
        logits = oracle()[0](torch.tensor([prompt + result.token_ids])).logits[0]
    expected = torch.log_softmax(logits, dim=-1)
    assert result.prompt_logprobs[0] is None
    for position, entry in enumerate(result.prompt_logprobs[1:], start=1):
        assert entry.token_id == prompt[position]
        assert entry.logprob == pytest.approx(float(expected[position - 1, prompt[position]]), abs=1e-3)
    for offset, entry in enumerate(result.logprobs):
        row = expected[len(prompt) - 1 + offset]
        assert entry.logprob == pytest.approx(float(row[result.token_ids[offset]]), abs=1e-3)
        assert [i for i, _ in entry.top] == torch.topk(row, 3).indices.tolist()
