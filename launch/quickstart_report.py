"""The quickstart's table: `quickstart_report.py BATCH_SUMMARY_JSON INTERACTIVE_JSON_LINES`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fastserve_hpc.stats import summarise


def main(batch_file: str, interactive_file: str) -> None:
    batch = json.loads(Path(batch_file).read_text())
    questions = [json.loads(line) for line in Path(interactive_file).read_text().splitlines()]
    table = Table(box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for heading in ("requests", "tokens/s", "TTFT p50", "p95", "latency p50", "p95"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_row("batch", str(batch["requests"]), f"{batch['output_tokens_per_s']:.1f}", *_times(batch))
    table.add_row("interactive", str(len(questions)), f"{_rate(questions):.1f}", *_times(_interactive(questions)))
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    console.print("Times in seconds; TTFT: time to the first token; tokens/s: of the whole batch, of one question.")


def _interactive(questions: list[dict[str, Any]]) -> dict[str, Any]:
    first = [question["ttft_s"] for question in questions if question["ttft_s"] is not None]
    return {"ttft_s": summarise(first), "latency_s": summarise([question["latency_s"] for question in questions])}


def _rate(questions: list[dict[str, Any]]) -> float:
    return float(sum(q["output_tokens"] for q in questions) / max(sum(q["latency_s"] for q in questions), 1e-9))


def _times(summary: dict[str, Any]) -> list[str]:
    values = [summary[name][p] for name in ("ttft_s", "latency_s") for p in ("p50", "p95")]
    return ["-" if value is None else f"{value:.2f}" for value in values]


if __name__ == "__main__":
    main(*sys.argv[1:])
