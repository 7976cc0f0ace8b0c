"""A client of servers with OpenAI's `/v1/completions`, of the shape that `bench.load.run_load` drives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastserve_hpc.errors import RequestError


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens that have come; which ones does not matter."""

    token_ids: tuple[int, ...]


class CompletionsClient:
    """One connection a request, as most clients have it."""

    def __init__(self, port: int, model: str) -> None:
        self._port = port
        self._model = model

    async def is_healthy(self) -> bool:
        try:
            status, _, writer = await self._send("GET", "/health", b"")
        except OSError:
            return False
        writer.close()
        return status == 200

    async def stream(self, prompt: list[int], *, max_tokens: int, ignore_eos: bool) -> AsyncIterator[Chunk]:
        """The answer's tokens as they come. Raises `RequestError` for a refusal."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        status, reader, writer = await self._send("POST", "/v1/completions", json.dumps(body).encode())
        try:
            if status != 200:
                raise RequestError(f"HTTP {status}: {(await reader.read(300)).decode(errors='replace')}")
            async for chunk in _chunks(reader):
                yield chunk
        finally:
            writer.close()

    async def _send(
        self, method: str, path: str, body: bytes
    ) -> tuple[int, asyncio.StreamReader, asyncio.StreamWriter]:
        """The status of the answer, whose body is left to be read."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        # HTTP/1.0 asks for a body that is not cut into chunks: it ends with the connection.
        head = f"{method} {path} HTTP/1.0\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        status = int((await reader.readline()).split()[1])
        while (await reader.readline()).strip():
            pass
        return status, reader, writer


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[Chunk]:
    """A token for each event with text; those that came without any, as the usage at the end tells."""
    count = 0
    async for line in reader:
        if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
            continue
        event: dict[str, Any] = json.loads(line[5:])
        if event.get("error"):
            raise RequestError(str(event["error"]))
        usage = event.get("usage") or {}
        choices = event.get("choices") or []
        new = 1 if choices and choices[0].get("text") else max(0, usage.get("completion_tokens", 0) - count)
        if new:
            count += new
            yield Chunk((0,) * new)
