#!/usr/bin/env bash
# All that can only be seen on a CUDA machine, in a few minutes: operations and models beside the CPU, torch.distributed
# over NCCL, copies to pinned memory, NVML, a short table of speeds. Fetches nothing; the environment $VENV (.venv) or
# the python3 on PATH has torch for CUDA and what `pip install 'fastserve-hpc[serve]'` brings. Exit status 0: all is
# well, 1: a check failed, 2: there is no GPU here.
#   launch/gpu_check.sh [--device cpu]   # the same code on the CPU, to try it out
set -euo pipefail
cd "$(dirname "$0")/.."

python=${VENV:-.venv}/bin/python
[ -x "$python" ] || python=$(command -v python3)
export PYTHONPATH=$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}
exec timeout --kill-after=10 460 "$python" -m launch.gpu_checks "$@"
