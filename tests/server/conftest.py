"""Each test has its own state directory, which server and client share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("SLURM_JOB_ID", "FASTSERVE_HPC_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FASTSERVE_HPC_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)
