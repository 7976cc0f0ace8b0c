"""The end of a step that cannot end by itself: `srun` waits for a rank that is stopped as for one that works."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

_GRACE_S = 2.0
"""So long the other ranks and the front door have to end in good order."""
_APART_S = 0.2
_LONGEST_S = 30.0


def kill_soon(environ: Mapping[str, str], rank: int) -> None:
    """Have Slurm kill this step in a moment, unless it ends before; does nothing outside of one.

    Every rank may call it: they take turns, and the first one's word ends the others' wait.
    """
    job, step = environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID")
    if not (job and step and job.isdecimal() and step.isdecimal()):
        return
    wait_s = min(_GRACE_S + _APART_S * rank, _LONGEST_S)
    command = [
        "/bin/sh",
        "-c",
        'sleep "$1"; exec scancel --quiet --signal=KILL "$2"',
        "sh",
        str(wait_s),
        f"{job}.{step}",
    ]
    try:
        subprocess.Popen(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        os.write(2, b"fastserve-hpc: no shell to run scancel with: end the step by hand if it does not end\n")
