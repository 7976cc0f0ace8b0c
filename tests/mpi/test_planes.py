"""Control plane and data plane between real ranks."""

import pytest

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
