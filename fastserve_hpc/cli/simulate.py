"""`fastserve-hpc simulate`: what a policy would do on hardware that is not here."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fastserve_hpc.cli.options import POSITIVE, input_path, json_option, output_path
from fastserve_hpc.errors import ConfigError

if TYPE_CHECKING:
    from fastserve_hpc.sim.hardware import Hardware
    from fastserve_hpc.sim.study import Point, Study
    from fastserve_hpc.sim.workload import Gaps, Source

_EPILOG = """\b
Two policies around a device's capacity; a sweep over rates with a figure:
  fastserve-hpc simulate --model llama-3-8b --hardware a100-80g \\
      --trace trace.jsonl --policy fcfs,skip-join --load 0.8,1.0,1.2 \\
      --max-batch 64 --seeds 4
  fastserve-hpc simulate --lengths sharegpt --policy fcfs,skip-join-paper \\
      --rate 1,2,3,4,5 --requests 400 --seeds 3 --figure curves.png

\b
All seconds are per output token from arrival to end, unless said otherwise.
Load 1 is what fcfs gets done while its queue is never empty. "growth" tells
how fast waiting grows: where it is well above 0 there is no steady state, and
every number depends on --requests.
"""


def _list(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[str, ...]:  # noqa: ARG001
    parts = tuple(part.strip() for part in (text or "").split(",") if part.strip())
    return tuple(dict.fromkeys(parts))


def _numbers(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in _list(ctx, param, text))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of numbers, as 0.8,1.2") from None
    if not all(0 < number < float("inf") for number in numbers):
        raise click.BadParameter(f"{text!r}: all must be above 0")
    return numbers


_COUNT = click.IntRange(min=1)


@click.command(epilog=_EPILOG, short_help="Compare policies on simulated hardware.")
@click.option(
    "--hardware",
    default="a100-40g",
    show_default=True,
    help="Known hardware (cpu: this machine), or a JSON file of its numbers.",
)
@click.option("--model", default="opt-13b", show_default=True, help="Known shape, or the path of a config.json.")
@click.option("--trace", type=input_path, help="JSON lines of times and lengths.")
@click.option("--lengths", help="sharegpt, or a JSON file of quantiles; times are drawn.")
@click.option("--policy", "policies", default="fcfs,skip-join", show_default=True, callback=_list, help="List of P,P.")
@click.option("--kv-policy", "kv_policies", default="recompute", show_default=True, callback=_list, help="List of K,K.")
@click.option("--rate", "rates", callback=_numbers, help="Requests a second: R,R.")
@click.option("--load", "loads", callback=_numbers, help="Rates as fractions of capacity: F,F.")
@click.option("--requests", type=_COUNT, default=400, show_default=True, help="Requests in a run.")
@click.option("--seeds", type=_COUNT, default=1, show_default=True, help="Runs of each point: seeds 0 .. N - 1.")
@click.option("--max-batch", type=_COUNT, default=16, show_default=True, help="Requests that run at the same time.")
@click.option("--tp", type=_COUNT, default=1, show_default=True, help="Ranks of a stage.")
@click.option("--pp", type=_COUNT, default=1, show_default=True, help="Stages.")
@click.option("--chunk", type=_COUNT, default=2048, show_default=True, help="Most tokens in one iteration.")
@click.option("--kv-tokens", help="Tokens in the KV cache, or ample. Default: what the memory holds.")
@click.option("--host-kv-tokens", type=click.IntRange(min=0), help="Tokens in host memory. Default: what 200 GB hold.")
@click.option(
    "--copies",
    type=click.Choice(["coalesced", "per-block"]),
    default="coalesced",
    show_default=True,
    help="Whether neighbouring KV blocks are copied in one piece.",
)
@click.option("--arrivals", default=None, help="trace, poisson or gamma:CV. Default: the trace's own, else poisson.")
@click.option("--scale-prompts", type=POSITIVE, default=1.0, help="Multiply the trace's prompt lengths by this.")
@click.option("--scale-outputs", type=POSITIVE, default=1.0, help="Multiply the trace's output lengths by this.")
@click.option(
    "--hints",
    default="none",
    show_default=True,
    help="expected_tokens: none, exact, noisy:X, scaled:X, wrong:X or shuffled.",
)
@click.option("--figure", type=output_path, help="Draw the curves into this PNG file (needs matplotlib).")
@json_option()
def command(as_json: bool, figure: Path | None, rates: Sequence[float], loads: Sequence[float], **options: Any) -> None:
    """Compare policies on simulated hardware, under the server's own scheduler."""
    if bool(rates) == bool(loads):
        raise ConfigError("give either --rate (requests a second) or --load (fractions of capacity)")
    study = _study(**options)
    points = list(study.at_rates(rates) if rates else study.at_loads(loads))
    if figure is not None:
        from fastserve_hpc.cli.figures import draw_curves

        draw_curves(points, figure)
    if as_json:
        from fastserve_hpc.sim import study as studies

        click.echo(json.dumps(studies.as_json(points)))
    else:
        _print_table(points)


def _study(
    hardware: str,
    model: str,
    policies: tuple[str, ...],
    kv_policies: tuple[str, ...],
    requests: int,
    seeds: int,
    hints: str,
    max_batch: int,
    tp: int,
    pp: int,
    chunk: int,
    kv_tokens: str | None,
    host_kv_tokens: int | None,
    copies: str,
    **source: Any,
) -> Study:
    from fastserve_hpc.core.kv_policy import KV_POLICIES
    from fastserve_hpc.core.policy import POLICIES
    from fastserve_hpc.sim.engine import BLOCK_SIZE, EngineSettings
    from fastserve_hpc.sim.hardware import find_hardware
    from fastserve_hpc.sim.shapes import find_shape
    from fastserve_hpc.sim.study import Study
    from fastserve_hpc.sim.workload import Hints

    _check_names("--policy", policies, tuple(POLICIES))
    _check_names("--kv-policy", kv_policies, tuple(KV_POLICIES))
    device, shape = _this_machine() if hardware == "cpu" else find_hardware(hardware), find_shape(model)
    settings = EngineSettings(
        costs=device.costs(shape, tp, pp),
        kv_tokens=_kv_tokens(kv_tokens) or device.kv_tokens(shape, tp, pp),
        max_batch=max_batch,
        max_batch_tokens=chunk,
        num_stages=pp,
        num_ranks=tp * pp,
        host_kv_tokens=device.host_kv_tokens(shape, tp * pp) if host_kv_tokens is None else host_kv_tokens,
        link=device.link(shape, tp * pp, BLOCK_SIZE, copies == "coalesced"),
    )
    return Study(
        settings=settings,
        source=_source(**source),
        num_requests=requests,
        policies=policies,
        kv_policies=kv_policies,
        seeds=tuple(range(seeds)),
        hints=Hints(hints),
    )


def _this_machine() -> Hardware:
    """As a server on one rank has measured it last, where one has."""
    from fastserve_hpc.config import state_dir
    from fastserve_hpc.server.calibration import DIRECTORY, costs_in, latest
    from fastserve_hpc.sim.hardware import as_measured, find_hardware

    known = find_hardware("cpu")
    record = latest(state_dir(dict(os.environ), Path.home()) / DIRECTORY, socket.gethostname())
    if record is None:
        return known
    shape = record.shape
    return as_measured(known, costs_in(record), shape.weight_bytes, shape.num_parameters, shape.kv_bytes_per_token)


def _check_names(option: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(f"{option} {name}: this version has {', '.join(known)}")
    if not names:
        raise ConfigError(f"{option}: name at least one of {', '.join(known)}")


_AMPLE_KV_TOKENS = 16_000_000


def _kv_tokens(text: str | None) -> int:
    """The size of the KV cache that was asked for; 0 where none was."""
    if text is None or text == "ample":
        return _AMPLE_KV_TOKENS if text else 0
    if not text.isdecimal() or int(text) < 32:
        raise ConfigError(f"--kv-tokens {text}: give a number of at least 32, or ample")
    return int(text)


def _source(
    trace: Path | None, lengths: str | None, arrivals: str | None, scale_prompts: float, scale_outputs: float
) -> Source:
    from fastserve_hpc.sim.lengths import find_lengths
    from fastserve_hpc.sim.workload import DrawnSource, Gaps, TraceSource, read_trace

    if (trace is None) == (lengths is None):
        raise ConfigError("give either --trace FILE or --lengths sharegpt|FILE")
    gaps = _gaps(arrivals)
    if trace is not None:
        return TraceSource(read_trace(trace, scale_prompts, scale_outputs), gaps)
    if arrivals == "trace":
        raise ConfigError("--arrivals trace: --lengths have no times; use poisson or gamma:CV")
    return DrawnSource(find_lengths(lengths or ""), gaps or Gaps())


def _gaps(text: str | None) -> Gaps | None:
    from fastserve_hpc.sim.workload import Gaps

    kind, _, variation = (text or "trace").partition(":")
    if kind == "trace" and not variation:
        return None
    if kind == "poisson" and not variation:
        return Gaps()
    try:
        if kind == "gamma" and 0 < float(variation) < 100:
            return Gaps(float(variation))
    except ValueError:
        pass
    raise ConfigError(f"--arrivals {text}: use trace, poisson, or gamma:CV with CV above 0, as gamma:2")


def _print_table(points: Sequence[Point]) -> None:
    from fastserve_hpc.sim.report import COLUMNS, rows

    lines = [COLUMNS, *rows(points)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        click.echo("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
