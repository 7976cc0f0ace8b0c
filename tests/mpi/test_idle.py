"""Idle ranks cost next to nothing, and are there at once when there is work."""

import re

import pytest

pytestmark = pytest.mark.mpi


def test_idle_ranks_use_two_percent_of_a_core_and_wake_at_once(mpi_run):
    output = mpi_run(2, "idle.py", 5)
    used = [float(text) for text in re.findall(r"cpu_s=(\S+)", output)]
    assert len(used) == 2
    assert max(used) < 0.1
    (answer_s,) = [float(text) for text in re.findall(r"answer_s=(\S+)", output)]
    assert answer_s < 0.1, "a doze lasts up to a second"
