"""Before MPI_Init, which hangs for minutes where nodes cannot reach each other: do all nodes of the step answer?"""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Iterable, Mapping

from fastserve_hpc.doctor.finding import Finding
from fastserve_hpc.slurm.environ import read_environ

PORT = 32767
"""Where nobody listens: just below the ports that systems hand out. A refusal is an answer, too."""
WAIT_S = 3.0

_ANSWERS = (0, errno.ECONNREFUSED, errno.ECONNRESET)


def preflight(environ: Mapping[str, str], timeout_s: float = WAIT_S) -> list[Finding]:
    """Warnings for the nodes of this Slurm step that do not answer this one. Empty outside of Slurm.

    A warning and no error, because MPI may have another network than the one that the nodes' names lead to; but
    an MPI_Init that does not return soon after it need not be waited for.
    """
    allocation = read_environ(environ)
    if allocation is None or (step := allocation.step) is None or step.local_rank != 0:
        return []
    silent = unreachable([node for node in step.nodes if node != step.node], timeout_s)
    cure = "MPI needs TCP on any port between all nodes: ask the site about firewalls; try other nodes (--exclude)"
    return [
        Finding("warning", "links", f"{node} does not answer ({reason})", cure, step.rank, step.node)
        for node, reason in silent.items()
    ]


def unreachable(hosts: Iterable[str], timeout_s: float, port: int = PORT) -> dict[str, str]:
    """The hosts from which no TCP packet comes back, and why. A name that cannot be resolved says nothing."""
    deadline = time.monotonic() + timeout_s
    silent: dict[str, str] = {}
    with selectors.DefaultSelector() as waiting:
        for host in hosts:
            if (address := _address(host, port)) is not None:
                _begin(host, address, waiting, silent)
        while waiting.get_map() and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in waiting.select(left_s):
                _end(key, waiting, silent)
        for key in list(waiting.get_map().values()):
            silent[key.data] = f"silent for {timeout_s:g} s"
            _socket(key).close()
    return silent


def _address(host: str, port: int) -> tuple[socket.AddressFamily, tuple[object, ...]] | None:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        return None
    return family, address


def _begin(
    host: str,
    address: tuple[socket.AddressFamily, tuple[object, ...]],
    waiting: selectors.BaseSelector,
    silent: dict[str, str],
) -> None:
    attempt = socket.socket(address[0], socket.SOCK_STREAM)
    attempt.setblocking(False)
    code = attempt.connect_ex(address[1])
    if code == errno.EINPROGRESS:
        waiting.register(attempt, selectors.EVENT_WRITE, host)
        return
    attempt.close()
    _judge(host, code, silent)


def _end(key: selectors.SelectorKey, waiting: selectors.BaseSelector, silent: dict[str, str]) -> None:
    attempt = _socket(key)
    waiting.unregister(attempt)
    _judge(key.data, attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), silent)
    attempt.close()


def _judge(host: str, code: int, silent: dict[str, str]) -> None:
    if code not in _ANSWERS:
        silent[host] = errno.errorcode.get(code, str(code))


def _socket(key: selectors.SelectorKey) -> socket.socket:
    assert isinstance(key.fileobj, socket.socket)
    return key.fileobj
