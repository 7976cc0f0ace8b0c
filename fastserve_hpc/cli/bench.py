"""`fastserve-hpc bench`: load after a trace, and the latencies that it meets."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fastserve_hpc.cli.options import POSITIVE, endpoint_options, input_path, json_option
from fastserve_hpc.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from fastserve_hpc.bench.load import Outcome
    from fastserve_hpc.bench.trace import Load
    from fastserve_hpc.core.engine import EngineStatus

_EPILOG = """\b
A trace's own times, four requests a second, everything at once:
  fastserve-hpc bench --endpoint demo --trace trace.jsonl
  fastserve-hpc bench --endpoint demo --trace trace.jsonl --rate 4 --json
  fastserve-hpc bench --endpoint demo --trace trace.jsonl --offline

A trace line is {"arrival_s": 1.5, "prompt_tokens": 120, "output_tokens": 40}. Prompts are random
token ids; answers have exactly the trace's length. All times count from when a request was due.
A request that does not fit the server's context is cut, and the number of those is said.
"""


@click.command(epilog=_EPILOG, short_help="Load a server as a trace says, report latencies.")
@click.option("--trace", type=input_path, required=True, help="JSON lines of times and lengths.")
@click.option("--requests", type=click.IntRange(min=1), help="Only the first so many requests of the trace.")
@click.option("--rate", type=POSITIVE, help="Scale the trace's times to so many a second.")
@click.option("--offline", is_flag=True, help="Send all requests at once.")
@click.option("--scale-lengths", type=POSITIVE, help="Multiply all lengths by this.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the prompts, and of times drawn for --rate.")
@endpoint_options()
@json_option()
def command(endpoint: str | None, job: str | None, as_json: bool, **load_options: Any) -> ExitCode:
    """Load a running server as a trace says and report throughput and latencies."""
    if load_options["offline"] and load_options["rate"] is not None:
        raise ConfigError("--offline sends everything at once, --rate spreads it: choose one")
    from fastserve_hpc.bench.load import load_server

    def plan(status: EngineStatus) -> tuple[list[Load], list[list[int]]]:
        return _plan(status, **load_options)

    outcomes, wall_s = load_server(endpoint, job, plan, _tick())
    return _show(outcomes, wall_s, as_json)


def _plan(status: EngineStatus, seed: int, **options: Any) -> tuple[list[Load], list[list[int]]]:
    from fastserve_hpc.bench.trace import make_prompts

    loads = _loads(status, seed=seed, **options)
    return loads, make_prompts(loads, status.vocab_size, seed)


def _loads(
    status: EngineStatus,
    trace: Path,
    requests: int | None,
    rate: float | None,
    offline: bool,
    scale_lengths: float | None,
    seed: int,
) -> list[Load]:
    from fastserve_hpc.bench import trace as traces

    loads = traces.read_trace(trace, requests)
    if scale_lengths is not None:
        loads = traces.scaled_lengths(loads, scale_lengths)
    loads, cut = traces.fitted(loads, status.max_model_len)
    if cut:
        note = f"{cut} of {len(loads)} requests are longer than the context of {status.max_model_len}: cut to fit"
        click.echo(f"bench: {note} (--scale-lengths keeps their proportions)", err=True)
    if offline:
        return traces.all_at_once(loads)
    return loads if rate is None else traces.at_rate(loads, rate, seed)


def _tick() -> Callable[[Outcome, int], None]:
    """Says on standard error what failed first and, each tenth of the load, how far it has come."""
    finished = failed = 0

    def tick(outcome: Outcome, total: int) -> None:
        nonlocal finished, failed
        finished += 1
        failed += outcome.error is not None
        if outcome.error is not None and failed == 1:
            click.echo(f"bench: a request failed: {outcome.error}", err=True)
        if finished % max(1, total // 10) == 0:
            failures = f", {failed} of them failed" if failed else ""
            click.echo(f"bench: {finished} of {total} requests finished{failures}", err=True)

    return tick


def _show(outcomes: Sequence[Outcome], wall_s: float, as_json: bool) -> ExitCode:
    from fastserve_hpc.bench.load import report

    result = report(outcomes, wall_s)
    if as_json:
        click.echo(json.dumps(result))
    else:
        _print_table(result)
    return ExitCode.SOME_LINES_FAILED if result["failed"] else ExitCode.DONE


def _print_table(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(
        f"{result['requests']} requests ({result['failed']} failed) in {result['wall_s']:.1f} s, "
        f"{result['output_tokens_per_s']:.1f} output tokens/s"
    )
    columns = ("mean", "p50", "p90", "p95", "p99")
    table = Table("seconds", *columns)
    for name in ("ttft_s", "tpot_s", "normalized_latency_s"):
        table.add_row(name.removesuffix("_s"), *(_cell(result[name][column]) for column in columns))
    console.print(table)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
