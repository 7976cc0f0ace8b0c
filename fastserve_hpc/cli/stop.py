"""`fastserve-hpc stop`: asks a server to end, and waits until it has."""

from __future__ import annotations

import time
from typing import Any

import click

from fastserve_hpc.cli.options import NOT_NEGATIVE, endpoint_options
from fastserve_hpc.errors import EndpointError, ExitCode

_EPILOG = """\b
Finish what runs, then end; or end at once:
  fastserve-hpc stop --endpoint demo
  fastserve-hpc stop --job 4711 --now
"""

_POLL_S = 0.2


@click.command(epilog=_EPILOG, short_help="End a server, finishing what it runs.")
@endpoint_options()
@click.option("--now", is_flag=True, help="Do not finish what runs.")
@click.option(
    "--wait", "wait_s", type=NOT_NEGATIVE, default=60.0, show_default=True, help="Seconds to wait for the end."
)
def command(endpoint: str | None, job: str | None, now: bool, wait_s: float) -> ExitCode:
    """End a server: it takes no more requests, finishes those it has (see serve --drain-s), and leaves."""
    from fastserve_hpc.client import Client

    with Client(endpoint, job=job) as client:
        client.drain(now=now)
        ended = _wait_until_gone(client, wait_s)
    if not ended and wait_s > 0:
        click.echo(f"still draining after {wait_s:g} s; it ends by itself, or at once with --now", err=True)
        return ExitCode.STOPPED_EARLY
    return ExitCode.DONE


def _wait_until_gone(client: Any, wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    has_said = False
    while time.monotonic() < deadline:
        try:
            status = client.status()
        except EndpointError:
            return True
        if status.state == "ended":
            return True
        unfinished = status.running + status.waiting
        if unfinished and not has_said:
            click.echo(f"waiting for {unfinished} request{'s' if unfinished > 1 else ''} to finish", err=True)
            has_said = True
        time.sleep(_POLL_S)
    return False
