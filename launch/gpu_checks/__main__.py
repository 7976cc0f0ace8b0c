"""Runs the checks one after the other; prints a table last. `launch/gpu_check.sh` starts it."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

NO_GPU = 2


@dataclass(frozen=True, slots=True)
class Row:
    check: str
    outcome: str
    detail: str
    seconds: float


def run_check(name: str, check: Callable[[], str]) -> Row:
    """The outcome of one check; a failure shows its traceback."""
    from launch.gpu_checks.checks import SkippedError

    print(f"- {name}", flush=True)
    began = time.monotonic()
    try:
        outcome, detail = "passed", check()
    except SkippedError as missing:
        outcome, detail = "skipped", str(missing)
    except Exception as error:
        traceback.print_exc()
        outcome, detail = "FAILED", f"{type(error).__name__}: {error}".splitlines()[0]
    return Row(name, outcome, detail, time.monotonic() - began)


def show(title: str, rows: Sequence[Row]) -> None:
    width = max(len(row.check) for row in rows)
    print(f"\n{title}")
    for row in rows:
        print(f"{row.check:<{width}}  {row.outcome:<7} {row.seconds:6.1f} s  {row.detail}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="launch/gpu_check.sh")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args(arguments)
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"no GPU: torch {torch.__version__} sees no CUDA device here (nvidia-smi must list one, and torch be")
        print("built for CUDA); --device cpu tries the checks out on the CPU")
        return NO_GPU
    from launch.gpu_checks import checks

    device = torch.device(options.device)
    rows = [run_check(name, lambda check=check: check(device)) for name, check in checks.ALL.items()]  # type: ignore[misc]
    show(f"{checks.describe(device)}, torch {torch.__version__}", rows)
    return int(any(row.outcome == "FAILED" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
