"""Shows 7 and 9: little memory changes no bit of an answer; what begins alike is computed once."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support import Server

from fastserve_hpc.client import AsyncClient, Client
from fastserve_hpc.errors import RequestError

BLOCK_BYTES = 16 * 30 * 2 * 3 * 64 * 2
"""16 positions of SmolLM2 in bf16: layers, keys and values, heads, head size, bytes."""
NUM_REQUESTS = 64
BLOCKS_OF_A_REQUEST = 4
FEW = 10 * BLOCKS_OF_A_REQUEST
"""Blocks for ten requests."""
PREFIX = [(7 * i) % 40_000 + 300 for i in range(600)]


class Answer(NamedTuple):
    token_ids: list[int]
    logprobs: list[tuple[int, float]]


@cache
def requests() -> list[dict[str, Any]]:
    """Prompts of 8 to 24 tokens, answers of 16 to 80: they need far more blocks in the end than at the beginning."""
    rng = random.Random("memory")
    prompts = [[rng.randrange(300, 40_000) for _ in range(rng.randint(8, 24))] for _ in range(NUM_REQUESTS)]
    return [
        {
            "prompt": prompt,
            "max_tokens": rng.randint(16, 80),
            "ignore_eos": True,
            "logprobs": 2,
            "temperature": rng.choice([0.0, 0.9]),
            "seed": i,
        }
        for i, prompt in enumerate(prompts)
    ]


async def _ask(endpoint: Path, asked: list[dict[str, Any]]) -> list[Answer]:
    async with AsyncClient(endpoint) as client:
        results = await asyncio.gather(*(client.generate(**one) for one in asked))
    return [Answer(r.token_ids, [(e.token_id, e.logprob) for e in r.logprobs]) for r in results]


def ask(server: Server, asked: list[dict[str, Any]]) -> list[Answer]:
    return asyncio.run(_ask(server.endpoint_file(), asked))


def options(blocks: int, ranks: int, *more: str) -> list[str]:
    return ["--dtype", "bfloat16", "--device-kv", str(blocks * BLOCK_BYTES // ranks), *more]


def wait_until_idle(server: Server) -> dict[str, Any]:
    """Every block is back."""
    deadline = time.monotonic() + 20
    while True:
        status = server.status()
        if not (status["running"] or status["waiting"] or status["device_blocks"]["used"]):
            break
        assert time.monotonic() < deadline, status
    assert status["host_blocks"]["used"] == 0
    return status


@pytest.fixture(scope="module")
def ample(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(tmp_path_factory.mktemp("home"), ["--dtype", "bfloat16", "--max-model-len", "2048"])
    started.wait_ready()
    if "torch reference" in started.output:
        started.close()
        pytest.skip("without the C++ kernels the same bits are not promised")
    yield started
    started.close()


@pytest.fixture(scope="module")
def expected(ample: Server) -> list[Answer]:
    """Alone with all the memory there is."""
    answers = ask(ample, requests())
    assert wait_until_idle(ample)["preemptions"] == 0
    return answers


SLOW = pytest.mark.slow
MPI = pytest.mark.mpi


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("kv_policy", "split", "more"),
    [
        pytest.param("proactive", {}, (), id="proactive"),
        pytest.param("reactive", {"pp": 2}, (), id="reactive pp 2", marks=MPI),
        pytest.param("recompute", {}, (), id="recompute", marks=SLOW),
        pytest.param("reactive", {}, (), id="reactive", marks=SLOW),
        pytest.param("proactive", {"pp": 2}, (), id="proactive pp 2", marks=[SLOW, MPI]),
        pytest.param("recompute", {"pp": 2}, (), id="recompute pp 2", marks=[SLOW, MPI]),
        pytest.param("proactive", {}, ("--host-kv", str(4 * BLOCK_BYTES)), id="4 blocks on the host", marks=SLOW),
        pytest.param("proactive", {}, ("--prefix-cache", "off"), id="no prefix cache", marks=SLOW),
    ],
)
def test_show_7_little_memory_changes_no_bit(
    start_server: Callable[..., Server],
    expected: list[Answer],
    kv_policy: str,
    split: dict[str, int],
    more: tuple[str, ...],
) -> None:
    """Under the policy that preempts most."""
    ranks = split.get("pp", 1)
    args = [word for name, count in split.items() for word in (f"--{name}", str(count))]
    args += ["--policy", "mlfq", "--kv-policy", kv_policy, *more]
    server = start_server(*options(FEW, ranks, *args), ranks=ranks).wait_ready()
    assert ask(server, requests()) == expected
    status = wait_until_idle(server)
    details = status["details"]
    moves = kv_policy in ("proactive", "reactive")
    assert status["preemptions"] > NUM_REQUESTS
    assert (details["offloaded_bytes"] > 0) == (details["uploaded_bytes"] > 0) == moves, details


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kv_policy", ["proactive", pytest.param("defer", marks=SLOW)])
def test_show_7_the_same_as_it_is_by_default(
    start_server: Callable[..., Server], expected: list[Answer], kv_policy: str
) -> None:
    """How often requests are preempted, if at all, is up to the policy."""
    server = start_server(*options(FEW, 1, "--kv-policy", kv_policy)).wait_ready()
    assert ask(server, requests()) == expected
    wait_until_idle(server)


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kv_policy", ["proactive", "reactive", "recompute"])
def test_show_7_the_same_with_tp_3(start_server: Callable[..., Server], kv_policy: str) -> None:
    """Other sums than on one rank: the reference is a run with ample memory."""
    answers = []
    for blocks in (1000, FEW):
        more = ("--tp", "3", "--policy", "mlfq", "--kv-policy", kv_policy)
        server = start_server(*options(blocks, 3, *more), ranks=3).wait_ready()
        answers.append(ask(server, requests()))
        wait_until_idle(server)
        server.close()
    assert answers[0] == answers[1]


async def _ask_and_leave(endpoint: Path) -> list[Answer | None]:
    """All at once; every third is given up at a random moment."""
    rng = random.Random("leave")

    async def one(client: AsyncClient, number: int, asked: dict[str, Any]) -> Answer | None:
        if number % 3:
            r = await client.generate(**asked)
            return Answer(r.token_ids, [(e.token_id, e.logprob) for e in r.logprobs])
        stream = client.stream(**asked)
        count, most = 0, rng.randrange(0, asked["max_tokens"])
        async for _ in stream:
            count += 1
            if count > most:
                break
        await stream.aclose()
        return None

    async with AsyncClient(endpoint) as client:
        return await asyncio.gather(*(one(client, i, asked) for i, asked in enumerate(requests())))


@pytest.mark.timeout(400)
def test_show_7_aborts_at_random_moments(start_server: Callable[..., Server], expected: list[Answer]) -> None:
    server = start_server(*options(FEW, 1, "--policy", "mlfq", "--host-kv", str(4 * BLOCK_BYTES))).wait_ready()
    answers = asyncio.run(_ask_and_leave(server.endpoint_file()))
    assert all(answer in (None, right) for answer, right in zip(answers, expected, strict=True))
    wait_until_idle(server)
    with Client(server.endpoint_file()) as client, pytest.raises(RequestError, match=rf"{FEW * 16}"):
        client.generate([300] * (FEW * 16), max_tokens=2)


def test_show_9_what_begins_alike_is_computed_once(ample: Server) -> None:
    tails = [[(31 * i + 7 * k) % 40_000 + 300 for k in range(4 + i % 9)] for i in range(100)]
    asked = [{"prompt": PREFIX + tail, "max_tokens": 4, "ignore_eos": True, "logprobs": 0} for tail in tails]
    before = ample.status()["details"]["prefix_tokens"]
    alone = ask(ample, [{**one, "cache_prefix": False} for one in asked[::20]])
    assert ample.status()["details"]["prefix_tokens"] == before
    answers = ask(ample, asked)
    assert answers[::20] == alone
    assert ample.status()["details"]["prefix_tokens"] - before >= 0.9 * len(PREFIX) * len(asked)


def test_prompt_logprobs_are_complete_with_a_cached_prefix(ample: Server) -> None:
    with Client(ample.endpoint_file()) as client:
        first, again, fresh = (
            client.generate(PREFIX[:100], max_tokens=2, prompt_logprobs=1, cache_prefix=cache_prefix)
            for cache_prefix in (True, True, False)
        )
    assert first.prompt_logprobs == again.prompt_logprobs == fresh.prompt_logprobs
    assert len(again.prompt_logprobs) == 100
