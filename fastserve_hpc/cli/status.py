"""`fastserve-hpc status`: what a running server is doing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from fastserve_hpc.cli.options import endpoint_options, json_option
from fastserve_hpc.errors import ExitCode

if TYPE_CHECKING:
    from fastserve_hpc.core.engine import BlockUsage, EngineStatus

_EPILOG = """\b
  fastserve-hpc status --endpoint demo
  fastserve-hpc status --job 4711 --json
"""

_PLAIN = ("state", "model", "max_model_len", "world_size", "tp", "pp", "policy", "running", "waiting")


@click.command(epilog=_EPILOG, short_help="Show what a server is doing.")
@endpoint_options()
@json_option()
def command(endpoint: str | None, job: str | None, as_json: bool) -> ExitCode:
    """Show a server's state, model, load and KV cache."""
    from fastserve_hpc.client import Client

    with Client(endpoint, job=job) as client:
        status = client.status()
    if as_json:
        click.echo(json.dumps(as_record(status)))
    else:
        _print_table(status)
    return ExitCode.DONE


def as_record(status: EngineStatus) -> dict[str, Any]:
    """The JSON that scripts rely on: these keys and no others."""
    return {
        **{name: getattr(status, name) for name in _PLAIN},
        "device_blocks": _blocks(status.device_blocks),
        "host_blocks": _blocks(status.host_blocks),
        "preemptions": status.preemptions,
        "uptime_s": status.uptime_s,
        "details": dict(status.details),
    }


def _blocks(usage: BlockUsage) -> dict[str, int]:
    return {"total": usage.total, "used": usage.used}


def _print_table(status: EngineStatus) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, text in _rows(status):
        table.add_row(f"[bold]{name}[/bold]", text)
    Console(highlight=False).print(table)


def _rows(status: EngineStatus) -> list[tuple[str, str]]:
    return [
        ("state", f"{status.state}, up {duration(status.uptime_s)}"),
        ("model", f"{status.model}, context {status.max_model_len:,} tokens"),
        ("ranks", f"{status.world_size} (tp {status.tp} x pp {status.pp}), policy {status.policy}"),
        ("requests", f"{status.running} running, {status.waiting} waiting, {status.preemptions} preemptions"),
        ("tokens", f"{status.prompt_tokens:,} of prompts, {status.output_tokens:,} of answers"),
        ("device KV", _share(status.device_blocks)),
        ("host KV", _share(status.host_blocks)),
        *_kv_rows(status.details),
        *_scheduling_rows(status.details),
    ]


def _scheduling_rows(details: dict[str, float]) -> list[tuple[str, str]]:
    """Requests by level, and what the policy has done to them; how far predictions of iterations are off."""
    levels = [f"{count:.0f} at {name[6:]}" for name, count in details.items() if name.startswith("level_") and count]
    acts = [f"{details[name]:,.0f} {name}" for name in ("replaced", "aged", "pinned", "promoted") if name in details]
    rows = [("levels", ", ".join(levels))] if levels else []
    rows += [("scheduling", ", ".join(acts))] if acts else []
    error = details.get("cost_model_error")
    return [*rows, ("cost model", f"predictions off by {error:.0%}")] if error is not None else rows


def _kv_rows(details: dict[str, float]) -> list[tuple[str, str]]:
    if "offloaded_bytes" not in details:
        return []
    moved = (f"{details[f'{way}_bytes'] / 1e6:,.1f} MB {way}" for way in ("offloaded", "uploaded"))
    return [
        ("KV moved", f"{', '.join(moved)}, {details.get('stall_s', 0.0):.1f} s waited for it"),
        (
            "KV reused",
            f"{details['prefix_tokens']:,.0f} tokens of prefixes; {details['recomputed_tokens']:,.0f} computed again",
        ),
    ]


def _share(usage: BlockUsage) -> str:
    percent = f" ({100 * usage.used / usage.total:.0f} %)" if usage.total else ""
    return f"{usage.used:,} of {usage.total:,} blocks used{percent}"


def duration(seconds: float) -> str:
    """As people say it: 42 s, 3 min 5 s, 2 h 10 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
