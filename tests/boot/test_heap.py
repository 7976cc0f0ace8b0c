"""Run in a process of its own: what malloc was told holds for good."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import resource, torch
from fastserve_hpc.boot.heap import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def iteration():
    tensors = [torch.ones(3_000_000) for _ in range(2)]

torch.set_num_threads(1)
keep_freed_memory()
for _ in range(20):
    iteration()
before = faults()
for _ in range(10):
    iteration()
print(faults() - before)
"""


def test_tensors_that_come_and_go_find_their_memory_again() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1000  # of 58,000 pages of 4 KB
