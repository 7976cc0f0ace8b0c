"""What the environment says about the launcher."""

import pytest

from fastserve_hpc.errors import ConfigError
from fastserve_hpc.parallel.mpi_init import UNKNOWN, check_known_failure, check_launcher, world_size_from_env

MPICH = "MPICH Version:      5.0.2\nMPICH configure:    --with-device=ch4:ucx,ofi --with-pm=hydra:gforker\n"
MPICH_PMIX = "MPICH Version:      4.2\nMPICH configure:    --with-pmi=pmix --with-pmix=/usr\n"
OPEN_MPI = "Open MPI v5.0.11, package: Open MPI"
SRUN = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8"}


@pytest.mark.parametrize(
    ("environ", "size"),
    [
        pytest.param({}, 1, id="no launcher"),
        pytest.param({"PMI_SIZE": "4", "PMI_RANK": "3"}, 4, id="hydra"),
        pytest.param({"PMI_SIZE": "1"}, 1, id="mpiexec -n 1"),
        pytest.param({"OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0"}, 2, id="mpirun of Open MPI"),
        pytest.param({"MV2_COMM_WORLD_SIZE": "2"}, 2, id="mvapich"),
        pytest.param({**SRUN, "PMI_SIZE": "8"}, 8, id="srun --mpi=pmi2"),
        pytest.param({**SRUN, "PMIX_RANK": "5"}, 8, id="srun --mpi=pmix"),
        pytest.param(SRUN, 8, id="srun --mpi=none"),
        pytest.param({"PMIX_RANK": "5"}, UNKNOWN, id="a PMIx launcher"),
        pytest.param({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, 1, id="in a batch script, without srun"),
        pytest.param({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, 1, id="srun --pty bash"),
        pytest.param(
            {**SRUN, "SLURM_STEP_NUM_TASKS": "3", "PMI_SIZE": "2"}, 2, id="mpiexec whose helpers srun has started"
        ),
        pytest.param(
            {"PMI_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "4"}, 4, id="mpirun in a shell that srun --mpi=pmi2 started"
        ),
        pytest.param({"PMI_SIZE": "", "SLURM_STEP_ID": "0"}, 1, id="empty"),
        pytest.param({"PMI_SIZE": "many"}, 1, id="garbage"),
        pytest.param({"PMI_SIZE": "-3"}, 1, id="negative"),
        pytest.param({"PMI_SIZE": "²"}, 1, id="a digit that is no number"),
    ],
)
def test_world_size_from_env(environ, size):
    assert world_size_from_env(environ) == size


def test_ranks_that_are_each_alone_are_refused_with_the_cure():
    with pytest.raises(ConfigError, match=r"4 ranks were started.*Open MPI v5.*srun --mpi=pmi2.*srun --mpi=pmix"):
        check_launcher(4, 1, "Open MPI v5.0.11")


@pytest.mark.parametrize(("announced", "size"), [(4, 4), (1, 1), (UNKNOWN, 3), (4, 2)])
def test_other_sizes_are_for_the_configuration_to_judge(announced, size):
    check_launcher(announced, size, "any")


@pytest.mark.parametrize(
    ("environ", "library", "fails"),
    [
        ({"PMIX_RANK": "0"}, MPICH, True),
        ({"PMIX_RANK": "0"}, MPICH_PMIX, False),
        ({"PMIX_RANK": "0"}, OPEN_MPI, False),
        ({"PMIX_RANK": "0", "PMI_FD": "7"}, MPICH, False),
        ({"PMI_RANK": "0"}, MPICH, False),
        ({}, MPICH, False),
    ],
)
def test_mpich_under_a_pmix_launcher_is_refused_before_it_aborts(environ, library, fails):
    if not fails:
        check_known_failure(environ, library)
        return
    with pytest.raises(ConfigError, match="use `srun --mpi=pmi2`"):
        check_known_failure(environ, library)
