"""`fastserve-hpc connect`: how to reach a server inside the cluster from outside of it."""

from __future__ import annotations

import getpass
import os
import shlex
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fastserve_hpc.cli.options import comes_from_environment, endpoint_options
from fastserve_hpc.errors import ConfigError

if TYPE_CHECKING:
    from fastserve_hpc.endpoint import Endpoint

_EPILOG = """\b
On a login node; it prints what to run on your own machine:
  fastserve-hpc connect 4711
  fastserve-hpc connect --endpoint demo --login alice@login.example.org
"""

_TEXT = """\
Run this on your own machine and leave it running:
  ssh -N -L {local_port}:{host}:{port} {login}
Then, in another terminal there:
  scp {login}:{file} .
  fastserve-hpc chat --endpoint ./{name}
The file holds the server's keys and is as secret as a password. It is of no use once the server has ended."""


@click.command(epilog=_EPILOG, short_help="Print the ssh tunnel that leads to a server.")
@click.argument("job_id", metavar="[JOBID]", required=False)
@endpoint_options()
@click.option("--local-port", type=click.IntRange(1, 65535), help="Port on your machine. Default: the server's own.")
@click.option("--login", metavar="USER@HOST", help="How ssh reaches this host from outside. Default: its own name.")
def command(
    job_id: str | None, endpoint: str | None, job: str | None, local_port: int | None, login: str | None
) -> None:
    """Print how to reach the server of a Slurm job from a laptop: an ssh tunnel, and an endpoint file for its end."""
    from fastserve_hpc.endpoint import find

    if job_id is not None and job is not None:
        raise ConfigError(f"both JOBID {job_id} and --job {job} were given: give one")
    if job_id is not None and comes_from_environment("endpoint"):
        endpoint = None
    found = find(endpoint, job=job_id or job)
    host, port = _tcp_place(found)
    file = _write_file(found, local_port or port)
    login = shlex.quote(login or f"{getpass.getuser()}@{socket.getfqdn()}")
    name = shlex.quote(file.name)
    text = _TEXT.format(
        local_port=local_port or port, host=host, port=port, login=login, file=shlex.quote(str(file)), name=name
    )
    click.echo(text)


def _tcp_place(endpoint: Endpoint) -> tuple[str, int]:
    """Host and port, the host as the cluster calls it."""
    for address in endpoint.addresses:
        if address.startswith("tcp://"):
            host, _, port = address.removeprefix("tcp://").rpartition(":")
            return host, int(port)
    raise ConfigError(f"the server of endpoint {endpoint.name!r} does not listen on TCP: start it with --tcp")


def _write_file(endpoint: Endpoint, port: int) -> Path:
    """The endpoint as it is seen at the tunnel's other end; what is left of servers that are gone is removed."""
    import msgspec

    from fastserve_hpc.endpoint import endpoints_dir, file_of, write

    directory = endpoints_dir(os.environ).parent / "tunnels"
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        for old in directory.glob("*.json"):
            if not file_of(old.stem, endpoints_dir(os.environ)).exists():
                old.unlink(missing_ok=True)
        path = file_of(endpoint.name, directory).absolute()
        write(path, msgspec.structs.replace(endpoint, addresses=[f"tcp://127.0.0.1:{port}"]))
    except OSError as error:
        raise ConfigError(f"{directory}: {error.strerror}; set FASTSERVE_HPC_HOME to a directory of yours") from error
    return path
