# shellcheck shell=bash
# Where things are at this site: the only file with modules and paths.
# Copy it, fit it, and give it to `fastserve-hpc sbatch ... --env FILE`; every job sources it first.

# module load gcc cuda

# The virtual environment that `fastserve-hpc` is installed in. All nodes must see it.
# source "$HOME/fastserve-hpc/.venv/bin/activate"

# Where servers leave their endpoint files for clients, on a file system that all nodes share.
# export FASTSERVE_HPC_HOME="$HOME/.fastserve-hpc"
