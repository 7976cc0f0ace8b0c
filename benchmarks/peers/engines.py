"""The two sides of a comparison: our server, and the peers that users have installed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.peers.completions import CompletionsClient
from fastserve_hpc.bench.load import Outcome, Run, run_load
from fastserve_hpc.bench.own_server import OwnServer
from fastserve_hpc.client import AsyncClient

START_TIMEOUT_S = 300.0
Result = tuple[Sequence[Outcome], float]
"""Outcomes and wall seconds."""


class PeerError(Exception):
    """A peer that does not start or ends early."""


class Engine(Protocol):
    """Loaded once, then measured several times."""

    def run(self, run: Run) -> Result: ...

    def close(self) -> None: ...


class Ours:
    """`fastserve-hpc serve` through its ZeroMQ front door."""

    def __init__(self, serve_options: Sequence[str]) -> None:
        self._server = OwnServer(serve_options)

    def run(self, run: Run) -> Result:
        return asyncio.run(self._run(run))

    async def _run(self, run: Run) -> Result:
        async with AsyncClient(self._server.endpoint) as client:
            await client.status()
            return await run_load(client, run, lambda *_: None)

    def close(self) -> None:
        self._server.close()


class OpenVino:
    """OpenVINO GenAI in a process of its own Python."""

    def __init__(self, python: Path, model: Path, num_threads: int) -> None:
        script = Path(__file__).with_name("openvino_process.py")
        self._process = subprocess.Popen(
            [str(python), str(script), str(model), str(num_threads)],
            env=_foreign_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def run(self, run: Run) -> Result:
        requests = [
            {"due_s": load.due_s, "prompt": prompt, "output_tokens": load.output_tokens}
            for load, prompt in zip(run.loads, run.prompts, strict=True)
        ]
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"requests": requests, "one_by_one": run.one_by_one}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        return [Outcome(int(tokens), first, last) for tokens, first, last in answer["outcomes"]], answer["wall_s"]

    def close(self) -> None:
        _end(self._process)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"OpenVINO's process ended with exit status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


class CompletionsServer:
    """A server with OpenAI's interface; `command` is started with `--port` and a free one."""

    def __init__(self, command: Sequence[str], model: str, environment: dict[str, str] | None = None) -> None:
        port = _free_port()
        self._client = CompletionsClient(port, model)
        self._process = subprocess.Popen(
            [*command, "--port", str(port)],
            env={**_foreign_environment(), **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            self._wait_healthy(Path(command[0]).name)
        except BaseException:
            self.close()
            raise

    def run(self, run: Run) -> Result:
        return asyncio.run(run_load(self._client, run, lambda *_: None))

    def close(self) -> None:
        _end(self._process)

    def _wait_healthy(self, name: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not asyncio.run(self._client.is_healthy()):
            if self._process.poll() is not None:
                raise PeerError(f"{name} ended with exit status {self._process.returncode} before it was ready")
            if time.monotonic() > deadline:
                raise PeerError(f"{name} was not ready after {START_TIMEOUT_S:.0f} s")
            time.sleep(0.2)


def llama_server(program: Path, model: Path, num_threads: int) -> CompletionsServer:
    """64 slots of 1,024 tokens, which is what the workloads need."""
    threads = str(num_threads)
    options = ["--parallel", "64", "--ctx-size", "65536", "--threads", threads, "--threads-batch", threads]
    return CompletionsServer([str(program), "--model", str(model), "--no-webui", *options], "model")


def vllm_server(python: Path, model: Path, num_threads: int) -> CompletionsServer:
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{num_threads - 1}",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "4",
    }
    options = ["--model", str(model), "--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "64"]
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", *options]
    return CompletionsServer(command, str(model), environment)


def _foreign_environment() -> dict[str, str]:
    """Without the paths of this Python, which are nothing to another."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end(process: subprocess.Popen[Any]) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
