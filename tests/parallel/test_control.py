"""Encoding of plans and reports, and the control plane of a single rank."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve_hpc.core.plan import (
    BlockCopy,
    IterationPlan,
    IterationResult,
    NewRequest,
    RankReport,
    SequenceSlice,
    TokenLogprobs,
)
from fastserve_hpc.core.request import SamplingParams
from fastserve_hpc.errors import RankError
from fastserve_hpc.parallel.control import LocalControl, PlanCodec

ids = st.integers(0, 2**40)
id_lists = st.lists(ids, max_size=5).map(tuple)
samplings = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(1, 10**6),
    temperature=st.none() | st.floats(0, 100),
    logit_bias=st.dictionaries(st.integers(0, 10**6), st.floats(-100, 100), max_size=4),
    seed=st.none() | st.integers(-(2**63) + 1, 2**63 - 1),
    stop=st.lists(st.text(min_size=1), max_size=3).map(tuple),
    stop_token_ids=id_lists,
    logprobs=st.none() | st.integers(0, 20),
)
slices = st.builds(SequenceSlice, ids, ids, ids, ids, id_lists, id_lists, st.booleans())
plans = st.builds(
    IterationPlan,
    st.integers(1, 2**40),
    st.lists(slices, max_size=5).map(tuple),
    st.lists(st.builds(NewRequest, ids, id_lists, samplings, ids), max_size=3).map(tuple),
    id_lists,
    st.lists(st.builds(BlockCopy, ids, ids, ids, st.booleans()), max_size=3).map(tuple),
    shutdown=st.booleans(),
)
logprobs = st.builds(
    TokenLogprobs, ids, st.floats(allow_nan=False), st.lists(st.tuples(ids, st.floats(-100, 0)), max_size=2).map(tuple)
)


@given(plans)
def test_plans_survive_the_wire(plan):
    codec = PlanCodec()
    assert codec.decode_plan(codec.encode(plan)) == plan


@given(id_lists, st.lists(st.none() | logprobs, max_size=3).map(tuple), ids)
def test_reports_survive_the_wire(token_ids, found, number):
    result = IterationResult(7, token_ids, found, prompt_logprobs=((number, found),), compute_s=0.25)
    report = RankReport(1, 7, number, number, result)
    codec = PlanCodec()
    assert codec.decode_report(codec.encode(report)) == report


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", b"\x81\xa7plan_id\xa1x", bytes(100)])
def test_what_cannot_be_decoded_is_fatal_and_named(data):
    with pytest.raises(RankError, match=f"a plan of {len(data)} bytes cannot be decoded"):
        PlanCodec().decode_plan(data)
    with pytest.raises(RankError, match="a report of"):
        PlanCodec().decode_report(data)


def test_a_single_rank_has_nobody_to_tell_or_hear():
    control = LocalControl()
    control.publish(IterationPlan(1))
    assert control.collect() == []
    control.close()


def test_a_single_rank_loads_no_mpi():
    code = (
        "import sys, fastserve_hpc.parallel.control, fastserve_hpc.parallel.single, fastserve_hpc.parallel.watchdog, "
        "fastserve_hpc.parallel.signals, fastserve_hpc.parallel.idle, fastserve_hpc.parallel.mpi_init\n"
        "print(sorted({'mpi4py', 'torch', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout == "[]\n", result.stderr
