"""Asks a server of another host, or of another container, whether it lives."""

from __future__ import annotations

import zmq

from fastserve_hpc import protocol
from fastserve_hpc.dealer import prepare
from fastserve_hpc.endpoint import Endpoint


def answers(endpoint: Endpoint, timeout_s: float = 3.0) -> bool:
    """Whether it answers a ping, or cannot be reached from here: then it may well live."""
    addresses = endpoint.reachable_addresses()
    if not addresses:
        return True
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        prepare(socket, endpoint.keys if addresses[0].startswith("tcp://") else None, linger_s=0)
        for address in addresses:
            socket.connect(address)
        for _ in addresses:  # spread over the connections in turn
            socket.send_multipart(protocol.encode(protocol.Ping(0)))
        return bool(socket.poll(int(timeout_s * 1000)))
