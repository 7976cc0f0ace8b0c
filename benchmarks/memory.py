"""What becomes of KV when the device is full, simulated: seconds per output token of every KV policy, and ablations.

python benchmarks/memory.py [--rates 2 3 4 5 6] [--kv-tokens 12000] [--requests 400] [--seeds 3] [--policy skip-join]
    [--hardware a100-40g] [--model opt-13b] [--limit 0.3]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from statistics import fmean

from fastserve_hpc.core.kv_policy import KV_POLICIES, KvPolicy
from fastserve_hpc.sim.engine import BLOCK_SIZE, EngineSettings, SimulatedEngine
from fastserve_hpc.sim.hardware import find_hardware
from fastserve_hpc.sim.lengths import SHAREGPT
from fastserve_hpc.sim.report import crossing
from fastserve_hpc.sim.shapes import find_shape
from fastserve_hpc.sim.workload import Arrival, DrawnSource

PROACTIVE = KV_POLICIES["proactive"]
VARIANTS: dict[str, KvPolicy] = {
    **KV_POLICIES,
    "no mirrors": replace(PROACTIVE, mirrors=False),
    "order, not ENST": replace(PROACTIVE, by_enst=False),
    "no prefetch": replace(PROACTIVE, prefetches=False),
}


def settings_of(args: argparse.Namespace, is_coalesced: bool, kv_tokens: int) -> EngineSettings:
    hardware, shape = find_hardware(args.hardware), find_shape(args.model)
    return EngineSettings(
        costs=hardware.costs(shape),
        kv_tokens=kv_tokens,
        max_batch=args.max_batch,
        max_batch_tokens=2048,
        host_kv_tokens=hardware.host_kv_tokens(shape, 1),
        link=hardware.link(shape, 1, BLOCK_SIZE, is_coalesced),
    )


def run(settings: EngineSettings, policy: str, kv_policy: KvPolicy, workloads: Sequence[list[Arrival]]) -> list[float]:
    """Mean s/token, preemptions, GB offloaded and uploaded, s stalled, thousands of tokens recomputed; over seeds."""
    rows = []
    for arrivals in workloads:
        engine = SimulatedEngine(settings, policy, kv_policy)
        engine.run(arrivals)
        kv, gigabytes = engine.scheduler.kv, settings.link.block_bytes / 1e9
        rows.append(
            (
                fmean(done.normalized_latency_s for done in engine.finished.values()),
                engine.scheduler.counters.preemptions,
                kv.num_offloaded * gigabytes,
                kv.num_uploaded * gigabytes,
                engine.stall_s,
                kv.counters.recomputed_tokens / 1000,
            )
        )
    return [fmean(column) for column in zip(*rows, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0, 3.0, 4.0, 5.0, 6.0])
    parser.add_argument("--kv-tokens", type=int, default=12_000)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--policy", default="skip-join")
    parser.add_argument("--hardware", default="a100-40g")
    parser.add_argument("--model", default="opt-13b")
    parser.add_argument("--max-batch", type=int, default=16)
    parser.add_argument("--limit", type=float, default=0.3)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    args = parser.parse_args()
    source = DrawnSource(SHAREGPT)
    curves: dict[str, list[tuple[float, float]]] = {}
    columns = (
        "requests/s",
        "copies",
        "KV",
        "s/token",
        "preempted",
        "GB out",
        "GB back",
        "stalled s",
        "1000 recomputed",
    )
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for rate in args.rates:
        workloads = [source.draw(args.requests, rate, Random(f"workload {seed}")) for seed in range(args.seeds)]
        for is_coalesced in (True, False):
            copies = "coalesced" if is_coalesced else "per block"
            for name in args.variants:
                settings = settings_of(args, is_coalesced, args.kv_tokens)
                row = run(settings, args.policy, VARIANTS[name], workloads)
                curves.setdefault(f"{name}, {copies}", []).append((rate, row[0]))
                cells = " | ".join((f"{row[0]:.4f}", f"{row[1]:.0f}", *(f"{value:.1f}" for value in row[2:])))
                print(f"| {rate:g} | {copies} | {name} | {cells} |", flush=True)
    print(f"\nFirst rates above {args.limit} s/token:")
    for name, points in curves.items():
        rate_above = crossing(points, args.limit)
        print(f"{name}: {f'{rate_above:.2f}' if rate_above else f'not up to {points[-1][0]:g}'}")


if __name__ == "__main__":
    main()
