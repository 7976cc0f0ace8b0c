"""Starts the ingress process and ends it. Used by rank 0, before MPI is initialised."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from fastserve_hpc.config import EngineConfig, ServerConfig
from fastserve_hpc.core.request import ModelLimits
from fastserve_hpc.endpoint import Endpoint, endpoints_dir, file_of
from fastserve_hpc.errors import ConfigError, ModelError
from fastserve_hpc.server import queues
from fastserve_hpc.server.endpoint import take_back
from fastserve_hpc.server.local_queue import CoordinatorQueue, FrameStream, IngressError, QueueClosed
from fastserve_hpc.server.queues import IngressRefused, IngressSettings

_LAUNCHER_PREFIXES = (
    "PMI_", "PMI2_", "PMIX_", "PRTE_", "OMPI_", "OPAL_", "ORTE_", "MPI_", "MPIR_", "MPICH_", "MPIEXEC_",
    "HYDRA_", "HYDI_", "I_MPI_", "MV2_", "SLURM_PMI", "SLURM_MPI_", "PALS_",
)  # fmt: skip
_ERRORS = {"ConfigError": ConfigError, "ModelError": ModelError}


def settings_from(
    engine: EngineConfig,
    server: ServerConfig,
    limits: ModelLimits,
    *,
    model: str,
    model_path: str | None,
    environ: Mapping[str, str] = os.environ,
) -> IngressSettings:
    """What the ingress must know. `model_path` None: the fake model's byte tokenizer."""
    return IngressSettings(
        model=model,
        model_path=model_path,
        limits=limits,
        endpoint=server.endpoint,
        tcp=server.tcp or "SLURM_JOB_ID" in environ,
        max_pending=server.max_pending,
        lease_s=server.lease_s,
        seed=engine.seed,
        world_size=engine.world_size,
        tp=engine.tp,
        pp=engine.pp,
        policy=engine.policy,
    )


class IngressProcess:
    """A running ingress. Start it early, do other work, then `wait_started`."""

    def __init__(self, settings: IngressSettings) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # All other descriptors (PMI_FD among them) are closed in it; a session of its own keeps it
            # from the terminal's Ctrl-C, which is the coordinator's to act on.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fastserve_hpc.server.ingress", str(theirs.fileno())],
                env=stripped(os.environ),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output belongs to the `ready` line
                start_new_session=True,
            )
        self._endpoint: Endpoint | None = None
        self._stream = FrameStream(ours)
        self._stream.write(queues.encode(settings))
        self.queue = CoordinatorQueue(self._stream)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_started(self, timeout_s: float = 60.0) -> Endpoint:
        """The endpoint under which clients find this server.

        To be called once, before the queue is used. Raises `ConfigError` or `ModelError` as the
        ingress did, `IngressError` if it died or does not answer.
        """
        try:
            answer = queues.decode_start(self._stream.read_one(timeout_s))
        except QueueClosed:
            raise IngressError(
                f"the ingress process died at its start with status {self._process.wait()}; its lines above say why"
            ) from None
        except TimeoutError:
            raise IngressError(f"the ingress process (pid {self.pid}) did not start within {timeout_s:g} s") from None
        if isinstance(answer, IngressRefused):
            raise _ERRORS[answer.error](answer.message)
        self._endpoint = answer.endpoint
        return answer.endpoint

    def close(self, timeout_s: float = 5.0) -> None:
        """Close the queue, on which the ingress takes its files back and leaves; end it if it does not. Idempotent."""
        deadline = time.monotonic() + timeout_s
        self.queue.close(linger_s=min(1.0, timeout_s))
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.returncode != 0 and self._endpoint is not None:
            _clean_up_after(self._endpoint)

    def __enter__(self) -> IngressProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _clean_up_after(endpoint: Endpoint) -> None:
    """Remove what an ingress that was killed could not."""
    take_back(file_of(endpoint.name, endpoints_dir()), endpoint)
    for address in endpoint.addresses:
        if address.startswith("ipc://"):
            shutil.rmtree(Path(address.removeprefix("ipc://")).parent, ignore_errors=True)


def stripped(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what would make a process look like a rank."""
    kept = {name: value for name, value in environ.items() if not name.startswith(_LAUNCHER_PREFIXES)}
    return {**kept, "TOKENIZERS_PARALLELISM": "false"}
