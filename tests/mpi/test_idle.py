"""Idle ranks cost next to nothing."""

import re

import pytest

pytestmark = pytest.mark.mpi


def test_idle_ranks_use_two_percent_of_a_core(mpi_run):
    output = mpi_run(2, "idle.py", 5)
    used = [float(text) for text in re.findall(r"cpu_s=(\S+)", output)]
    assert len(used) == 2
    assert max(used) < 0.1, "0.2 s in 10 s"
