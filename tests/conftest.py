"""Fixtures for all tests; what they are made of is in support.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import Server

# Read when torch loads libgomp. OpenMP threads that spin while idle make tests beside a busy process very slow.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")


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
