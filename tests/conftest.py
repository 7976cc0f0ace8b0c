"""Fixtures for all tests; what they are made of is in support.py."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import Server

# Read when torch loads libgomp. OpenMP threads that spin while idle make tests beside a busy process very slow.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def pytest_configure() -> None:
    """Ctrl-C works in tests that run side by side, whose processes were started to ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers that are surely gone after the test: `start_server("--model", "fake", ranks=2)`."""
    servers: list[Server] = []

    def start(*args: str, home: Path | None = None, **kwargs: Any) -> Server:
        servers.append(Server(home or tmp_path / "home", list(args), **kwargs))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
