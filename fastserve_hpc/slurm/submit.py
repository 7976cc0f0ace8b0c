"""Handing a script to sbatch."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence

from fastserve_hpc.errors import ConfigError, FastServeError

_TIMEOUT_S = 60.0


def submit(script: str, timeout_s: float = _TIMEOUT_S) -> str:
    """Submit the script; returns the job's id."""
    printed = _sbatch(["--parsable"], script, timeout_s).strip()
    match = re.fullmatch(r"(\d+)(?:;.*)?", printed)
    if match is None:
        raise FastServeError(f"sbatch printed {printed!r} where a job id was due: look at `squeue --me`")
    return match[1]


def check(script: str, timeout_s: float = _TIMEOUT_S) -> None:
    """Let sbatch say whether it would take the script (`--test-only`). Raises `FastServeError` with its reason."""
    _sbatch(["--test-only"], script, timeout_s)


def _sbatch(options: Sequence[str], script: str, timeout_s: float) -> str:
    if shutil.which("sbatch") is None:
        raise ConfigError("no sbatch here: run this on a login node, or print the script without --submit")
    try:
        done = subprocess.run(["sbatch", *options], input=script, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise FastServeError(
            f"sbatch has not answered for {timeout_s:g} s: is slurmctld up? Try `scontrol ping`"
        ) from None
    if done.returncode != 0:
        reason = re.sub(r"^(sbatch: |error: |allocation failure: )+", "", done.stderr.strip(), flags=re.MULTILINE)
        raise FastServeError(f"sbatch refused the script: {reason or f'exit status {done.returncode}'}")
    return done.stdout
