"""The asynchronous client against a real ingress with a toy engine."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from front_door import FrontDoor, wait_until

from fastserve_hpc.client import AsyncClient
from fastserve_hpc.errors import BusyError, EndpointError, RequestError


@pytest.fixture
def door(home: Path) -> Iterator[FrontDoor]:
    with FrontDoor() as door:
        yield door


async def text_of(client: AsyncClient, prompt: str, max_tokens: int) -> str:
    return "".join([event.text async for event in client.stream(prompt, max_tokens=max_tokens)])


def test_many_at_once_each_get_their_own(door: FrontDoor) -> None:
    async def main() -> list[str]:
        async with AsyncClient("test") as client:
            streams = (text_of(client, f"{i:03}", 30) for i in range(100))
            wholes = (client.generate(f"{i:03}", max_tokens=30) for i in range(100, 200))
            texts = await asyncio.gather(*streams)
            return [*texts, *(g.text for g in await asyncio.gather(*wholes))]

    assert asyncio.run(main()) == [f"{i:03}" * 10 for i in range(200)]


def test_it_connects_with_the_first_call_and_only_once(door: FrontDoor) -> None:
    async def main() -> None:
        client = AsyncClient("test")
        assert client._connection is None
        results = await asyncio.gather(client.status(), client.status(), client.generate("ab", max_tokens=2))
        assert [r.state for r in results[:2]] == ["ready", "ready"]
        assert results[2].text == "ab"
        await client.close()
        await client.close()
        assert (await client.generate("cd", max_tokens=2)).text == "cd"  # connects anew
        await client.close()

    asyncio.run(main())


def test_cancelling_closing_and_dropping_cancel_in_the_engine(door: FrontDoor) -> None:
    async def main() -> None:
        async with AsyncClient("test") as client:
            task = asyncio.create_task(client.generate("a", max_tokens=90_000))
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            stream = client.stream("b", max_tokens=90_000)
            await stream.__anext__()
            await stream.aclose()
            await stream.aclose()
            assert [e async for e in stream] == []
            async for event in client.stream("c", max_tokens=90_000):
                assert event.text == "c"
                break
            gc.collect()
            await asyncio.sleep(0.3)
            assert (await client.status()).running == 0
            never_begun = client.stream("d", max_tokens=5)
            await never_begun.aclose()
            assert client._calls.open_ids == []

    asyncio.run(main())
    assert sorted(door.engine.cancelled) == [1, 2, 3]


def test_a_wait_that_timed_out_may_be_taken_up_again(door: FrontDoor) -> None:
    async def main() -> str:
        door.engine.running.clear()
        async with AsyncClient("test") as client:
            stream = client.stream("ab", max_tokens=2)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(stream.__anext__(), 0.2)
            door.engine.running.set()
            return "".join([e.text async for e in stream])

    assert asyncio.run(main()) == "ab"


def test_refusals_are_exceptions_of_their_own_call(home: Path) -> None:
    async def main() -> None:
        with FrontDoor(max_pending=2) as door:
            door.engine.running.clear()
            async with AsyncClient("test") as client:
                waiting = asyncio.create_task(client.generate("ab", max_tokens=2))
                outcomes = await asyncio.gather(
                    client.generate("x", n=2),
                    client.generate("x", top_p=0.0),
                    client.generate("x", model="gpt"),
                    return_exceptions=True,
                )
                door.engine.running.set()
                assert (await waiting).text == "ab"
            assert isinstance(outcomes[0], BusyError)
            assert [type(o) for o in outcomes[1:]] == [RequestError, RequestError]
            with pytest.raises(TypeError, match="max_token"):
                client.stream("x", max_token=1)

    asyncio.run(main())


def test_a_killed_and_a_stopped_server_end_the_waits_in_bounded_time(home: Path) -> None:
    async def main(number: int) -> float:
        with FrontDoor() as door:
            door.engine.running.clear()
            client = AsyncClient("test", silence_s=1.5)
            waits = [asyncio.create_task(client.generate("a", max_tokens=2)) for _ in range(5)]
            await asyncio.sleep(0.3)
            os.kill(door.process.pid, number)
            started = time.monotonic()
            outcomes = await asyncio.gather(*waits, return_exceptions=True)
            assert all(isinstance(o, EndpointError) for o in outcomes)
            await client.close()
            os.kill(door.process.pid, signal.SIGCONT)
            return time.monotonic() - started

    assert asyncio.run(main(signal.SIGKILL)) < 2.0
    assert asyncio.run(main(signal.SIGSTOP)) < 6.0


def test_cut_at_random_moments_nothing_stays_behind(door: FrontDoor) -> None:
    rng = random.Random(0)

    async def one(client: AsyncClient) -> None:
        stream = client.stream("x", max_tokens=5000)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(_drain(stream), rng.uniform(0.0, 0.2))
        if rng.random() < 0.5:
            await stream.aclose()

    async def main() -> int:
        for _ in range(5):
            client = AsyncClient("test")
            await asyncio.gather(*(one(client) for _ in range(40)))
            await client.close()
        async with AsyncClient("test") as client:
            return (await client.generate("x", max_tokens=3)).usage.completion_tokens

    async def _drain(stream: object) -> None:
        async for _ in stream:  # type: ignore[attr-defined]
            pass

    assert asyncio.run(main()) == 3, "the server answers as before"
    wait_until(lambda: not door.engine.open)


def test_a_program_that_blocks_its_loop_does_not_mistake_that_for_silence(door: FrontDoor) -> None:
    async def main() -> str:
        async with AsyncClient("test", silence_s=0.5) as client:
            stream = client.stream("ab", max_tokens=100)
            first = await stream.__anext__()
            time.sleep(1.5)
            return first.text + "".join([e.text async for e in stream])

    assert asyncio.run(main()) == "ab" * 50


def test_an_idle_connection_is_not_silent(door: FrontDoor) -> None:
    async def main() -> None:
        async with AsyncClient("test", silence_s=0.5) as client:
            for _ in range(2):
                assert (await client.generate("ab", max_tokens=2)).text == "ab"
                connection = client._connection
                await asyncio.sleep(2.2)
                assert client._connection is connection

    asyncio.run(main())


def test_a_client_may_outlive_its_event_loop(door: FrontDoor) -> None:
    client = AsyncClient("test")
    assert asyncio.run(text_of(client, "ab", 2)) == "ab"

    assert asyncio.run(text_of(client, "cd", 2)) == "cd"
    asyncio.run(client.close())
