"""`fastserve-hpc bench`: load on a server, and the throughput and latencies that it meets."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from fastserve_hpc.cli.counted import counted_parts
from fastserve_hpc.cli.options import POSITIVE, endpoint_options, input_path, json_option
from fastserve_hpc.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from fastserve_hpc.bench.load import Outcome, Run
    from fastserve_hpc.bench.plan import LoadOptions
    from fastserve_hpc.core.engine import EngineStatus

_EPILOG = """\b
Throughput, latency, a single stream (here on a server started for it):
  fastserve-hpc bench --endpoint demo --workload w1
  fastserve-hpc bench --endpoint demo --workload w2 --rate 5.4 --json
  fastserve-hpc bench --workload w3 --serve -- --model smollm2-135m --pp 2

\b
A trace at its own times, four a second, all at once, one by one:
  fastserve-hpc bench --endpoint demo --trace trace.jsonl
  fastserve-hpc bench --endpoint demo --trace trace.jsonl --rate 4
  fastserve-hpc bench --endpoint demo --trace trace.jsonl --offline
  fastserve-hpc bench --endpoint demo --trace trace.jsonl --one-by-one

\b
w1  64 requests of 128 tokens at once, 64 tokens each as answers
w2  100 Poisson arrivals at 5.4 a second, prompts of 8 to 512 tokens
    (median 60), answers of 4 to 256 (median 40)
w3  5 requests of 128 tokens, answers of 128, one after the other
Before w1, w2 and w3, 8 short requests warm the server up.

A trace line is {"arrival_s": 1.5, "prompt_tokens": 120, "output_tokens": 40}. Prompts are random
token ids; answers have exactly the wanted length. All times count from when a request was due.
A request that does not fit the server's context is cut, and the number of those is said.
Preemptions, prefixes and KV that moved are what the server counted meanwhile, for all clients.
"""
_LATENCIES = ("ttft_s", "tpot_s", "latency_s", "normalized_latency_s")


@click.command(epilog=_EPILOG, short_help="Load a server, report throughput and latencies.")
@click.option("--workload", type=click.Choice(["w1", "w2", "w3"]), help="One of the workloads below.")
@click.option("--trace", type=input_path, help="JSON lines of times and lengths.")
@click.option("--requests", type=click.IntRange(min=1), help="So many requests: the first ones of a trace.")
@click.option("--rate", type=POSITIVE, help="Arrivals a second on average, with the pattern of the trace or of w2.")
@click.option("--offline", is_flag=True, help="Send all requests at once.")
@click.option("--one-by-one", is_flag=True, help="Send each request when the one before it has ended.")
@click.option("--scale-lengths", type=POSITIVE, help="Multiply all lengths by this.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the prompts, and of times drawn for --rate.")
@click.option("--serve", is_flag=True, help="Start a server for it on this machine; its options come behind --.")
@click.argument("serve_options", nargs=-1, type=click.UNPROCESSED)
@endpoint_options()
@json_option()
def command(
    endpoint: str | None, job: str | None, serve: bool, serve_options: tuple[str, ...], as_json: bool, **load: Any
) -> ExitCode:
    """Load a running server, or one that this starts, and report throughput and latencies."""
    from fastserve_hpc.bench.plan import LoadOptions

    options = LoadOptions(**load)
    if serve_options and not serve:
        raise ConfigError(f"{' '.join(serve_options)}: the options of a server are for --serve, which starts one")
    result = _measure_own(serve_options, options) if serve else _measure(endpoint, job, options)
    if as_json:
        click.echo(json.dumps(result))
    else:
        _print_table(result)
    return ExitCode.SOME_LINES_FAILED if result["failed"] else ExitCode.DONE


def _measure_own(serve_options: tuple[str, ...], options: LoadOptions) -> dict[str, Any]:
    """The report on a server that runs meanwhile, and what it used."""
    from fastserve_hpc.bench.own_server import OwnServer

    with OwnServer(serve_options) as server:
        before = server.usage()["cpu_s"]
        result = _measure(server.endpoint, None, options)
        usage = server.usage()
    usage["cpu_s"] = {name: round(seconds - before.get(name, 0.0), 2) for name, seconds in usage["cpu_s"].items()}
    return {**result, "server": usage}


def _measure(endpoint: str | None, job: str | None, options: LoadOptions) -> dict[str, Any]:
    from fastserve_hpc.bench.load import load_server, report
    from fastserve_hpc.bench.processes import OthersWatch

    others = OthersWatch()
    loaded = load_server(endpoint, job, lambda status: _run(options, status), _tick())
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "other_busy_cores": round(others.busy_cores(), 2),
    }
    measured = report(loaded.outcomes, loaded.wall_s)
    return {"workload": options.workload, **measured, "counted": loaded.counted, "machine": machine}


def _run(options: LoadOptions, status: EngineStatus) -> Run:
    run, cut = options.run(status)
    if cut:
        note = f"{cut} of {len(run.loads)} requests are longer than the context of {status.max_model_len}: cut to fit"
        click.echo(f"bench: {note} (--scale-lengths keeps their proportions)", err=True)
    return run


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


def _print_table(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    decode = result["decode_tokens_per_s"]
    console.print(
        f"{result['requests']} requests ({result['failed']} failed) in {result['wall_s']:.1f} s, "
        f"{result['output_tokens_per_s']:.1f} output tokens/s"
        + ("" if decode is None else f"; one request decodes at {decode:.1f} tokens/s")
    )
    columns = ("mean", "p50", "p90", "p95", "p99")
    table = Table("seconds", *columns)
    for name in _LATENCIES:
        table.add_row(name.removesuffix("_s"), *(_cell(result[name][column]) for column in columns))
    console.print(table)
    if parts := counted_parts(result["counted"]):
        console.print(f"meanwhile the server counted {', '.join(parts)}")
    if "server" in result:
        console.print(_usage(result["server"]))
    machine = result["machine"]
    whose = "others" if "server" in result else "others and the server"
    console.print(
        f"{machine['cores']} cores, load average {machine['load_average']:.1f}, "
        f"{machine['other_busy_cores']:.2f} cores busy with {whose}"
    )


def _usage(server: dict[str, dict[str, float]]) -> str:
    parts = [
        f"{name} {seconds:.1f} s, {server['peak_rss_bytes'][name] / 2**20:.0f} MiB at most"
        for name, seconds in server["cpu_s"].items()
    ]
    return "processor time and resident memory: " + "; ".join(parts)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
