"""Runs commands in this process, against fake clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fake_client import FakeAsyncClient, FakeClient, FakeServer

import fastserve_hpc.batch.attached
import fastserve_hpc.bench.load
import fastserve_hpc.client
from fastserve_hpc.cli import main

Run = Callable[..., Result]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    """What the commands of the test talk to."""
    server = FakeServer()
    for name, fake in (("Client", FakeClient), ("AsyncClient", FakeAsyncClient)):
        monkeypatch.setattr(fake, "server", server)
        monkeypatch.setattr(fastserve_hpc.client, name, fake, raising=False)
    for module in (fastserve_hpc.batch.attached, fastserve_hpc.bench.load):
        monkeypatch.setattr(module, "AsyncClient", FakeAsyncClient)
    return server


@pytest.fixture
def run(server: FakeServer) -> Run:
    """`run("status", "--json")`: the command's result."""

    def run(*args: str, **kwargs: Any) -> Result:
        return CliRunner().invoke(main, args, **kwargs)

    return run
