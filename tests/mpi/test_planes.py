"""Control plane and data plane between real ranks."""

import pytest

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("n", [2, 4])
def test_1000_plans_and_reports_arrive_in_order(mpi_run, n):
    assert "plans=1000" in mpi_run(n, "control.py", 1000)


@pytest.mark.parametrize(("n", "tp_size"), [(2, 1), (4, 1), (4, 2)])
def test_hidden_states_of_any_shape_pass_through_stages(mpi_run, n, tp_size):
    assert "tensors=150" in mpi_run(n, "stages.py", "mpi", tp_size, 150)


@pytest.mark.parametrize(("n", "tp_size"), [(2, 2), (4, 4), (4, 2), (3, 3), (2, 1)])
def test_sums_are_taken_in_rank_order_on_every_rank(mpi_run, n, tp_size):
    assert "equal" in mpi_run(n, "collectives.py", "mpi", tp_size)


@pytest.mark.parametrize(("n", "tp_size"), [(2, 2), (4, 2)])
def test_torch_collectives_agree(mpi_run, n, tp_size):
    assert "equal" in mpi_run(n, "collectives.py", "torch", tp_size)


@pytest.mark.parametrize(("n", "tp_size"), [(2, 1), (4, 2)])
def test_torch_passes_hidden_states_through_stages(mpi_run, n, tp_size):
    assert "tensors=60" in mpi_run(n, "stages.py", "torch", tp_size, 60)
