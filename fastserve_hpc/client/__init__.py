"""The Python client. Imports neither torch nor MPI, nor anything of the server.

from fastserve_hpc.client import Client

with Client("demo") as client:
    print(client.generate("The capital of France is", max_tokens=8).text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastserve_hpc.client.results import Choice, Event, Generation, Score
from fastserve_hpc.client.sync import Client, Stream
from fastserve_hpc.errors import BusyError, EndpointError, RequestError

if TYPE_CHECKING:
    from fastserve_hpc.client.aio import AsyncClient, AsyncStream

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "BusyError",
    "Choice",
    "Client",
    "EndpointError",
    "Event",
    "Generation",
    "RequestError",
    "Score",
    "Stream",
]


def __getattr__(name: str) -> object:
    """The asynchronous client is loaded when it is asked for: asyncio takes a third of the import time."""
    if name in ("AsyncClient", "AsyncStream"):
        from fastserve_hpc.client import aio

        return getattr(aio, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
