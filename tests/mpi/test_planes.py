"""Control plane and data plane between real ranks."""

from pathlib import Path

import pytest
from fastserve_kernels import load
from models.harness import write_llama

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("n", [2, 4])
def test_1000_plans_and_reports_arrive_in_order(mpi_run, n):
    assert "plans=1000" in mpi_run(n, "control.py", 1000)


@pytest.mark.parametrize(("n", "cases"), [(2, ["mpi:1", "torch:1"]), (4, ["mpi:1", "mpi:2", "torch:2"])])
def test_hidden_states_of_any_shape_pass_through_stages(mpi_run, n, cases):
    output = mpi_run(n, "stages.py", 100, *cases)
    assert all(f"{case} tensors=100" in output for case in cases)


@pytest.mark.parametrize(
    ("n", "cases"),
    [(2, ["mpi:2", "mpi:1", "torch:2"]), (3, ["mpi:3"]), (4, ["mpi:4", "torch:2"])],
)
def test_sums_and_joins_are_right_and_equal_on_every_rank(mpi_run, n, cases):
    output = mpi_run(n, "collectives.py", *cases)
    assert all(f"{case} equal" in output for case in cases)


@pytest.fixture(scope="module")
def kernels():
    found = load(num_threads=1)
    if found is None:
        pytest.skip("no C++ kernels: run python kernels/build.py")
    return found


@pytest.mark.parametrize(("n", "cases"), [(2, ["shared:2"]), (4, ["shared:4", "shared:2", "shared:1"])])
def test_sums_through_shared_memory_are_the_same(kernels, mpi_run, n, cases):
    output = mpi_run(n, "collectives.py", *cases)
    assert all(f"{case} equal" in output for case in cases)


def test_a_segment_leaves_nothing_behind(kernels, mpi_run):
    before = set(Path("/dev/shm").glob("fastserve-*"))
    mpi_run(2, "collectives.py", "shared:2")
    assert not set(Path("/dev/shm").glob("fastserve-*")) - before


@pytest.mark.parametrize("n", [2, 4])
def test_ranks_share_a_model_in_bf16(kernels, mpi_run, tmp_path, n):
    write_llama(
        tmp_path, hidden_size=128, num_attention_heads=8, num_key_value_heads=2, head_dim=32, intermediate_size=100
    )
    assert "ranks agree" in mpi_run(n, "tensor_parallel.py", tmp_path)
