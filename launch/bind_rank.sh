#!/usr/bin/env bash
# Gives each rank of a node its share of the cores and its own GPU, then becomes the command:
#   mpiexec -n 4 launch/bind_rank.sh fastserve-hpc serve --pp 4
# The launcher tells the place on the node (Hydra, Open MPI, PMIx, Slurm). Where it does not, or has bound
# ranks itself, nothing is changed.
set -euo pipefail

local_rank=${MPI_LOCALRANKID:-${OMPI_COMM_WORLD_LOCAL_RANK:-${PMIX_LOCAL_RANK:-${SLURM_LOCALID:-}}}}
local_size=${MPI_LOCALNRANKS:-${OMPI_COMM_WORLD_LOCAL_SIZE:-${PMIX_LOCAL_SIZE:-}}}
if [ -z "$local_size" ] && [ -n "${SLURM_LOCALID:-}" ]; then
    # "2(x3),1" is two tasks on each of three nodes, then one: written out, entry SLURM_NODEID is ours.
    counts=()
    IFS=, read -ra groups <<<"${SLURM_STEP_TASKS_PER_NODE:-1}"
    for group in "${groups[@]}"; do
        repeat=1
        if [[ $group =~ \(x([0-9]+)\)$ ]]; then repeat=${BASH_REMATCH[1]}; fi
        for ((i = 0; i < repeat; i++)); do counts+=("${group%%(*}"); done
    done
    local_size=${counts[${SLURM_NODEID:-0}]:-1}
fi
if [ -z "$local_rank" ] || [ "${local_size:-1}" -le 1 ]; then exec "$@"; fi

# The cores this process may use, one a word.
cores=()
IFS=, read -ra ranges <<<"$(awk '/^Cpus_allowed_list/ {print $2}' /proc/self/status)"
for range in "${ranges[@]}"; do
    for ((core = ${range%-*}; core <= ${range#*-}; core++)); do cores+=("$core"); done
done

bound_by_launcher=0
case "${SLURM_CPU_BIND_TYPE:-}" in *mask_cpu* | *map_cpu* | *rank* | *cores* | *threads* | *sockets* | *ldoms*) bound_by_launcher=1 ;; esac
share=$((${#cores[@]} / local_size))
if [ "$bound_by_launcher" = 0 ] && [ "$share" -ge 1 ] && command -v taskset >/dev/null; then
    mine=("${cores[@]:$((local_rank * share)):$share}")
    list=$(IFS=,; echo "${mine[*]}")
    taskset -cp "$list" $$ >/dev/null
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$share}
fi

# One GPU each, where more than one can be seen.
if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
    IFS=, read -ra gpus <<<"$CUDA_VISIBLE_DEVICES"
elif command -v nvidia-smi >/dev/null; then
    mapfile -t gpus < <(nvidia-smi --query-gpu=uuid --format=csv,noheader 2>/dev/null || true)
else
    gpus=()
fi
if [ "${#gpus[@]}" -gt 1 ]; then
    export CUDA_VISIBLE_DEVICES=${gpus[$((local_rank % ${#gpus[@]}))]}
fi
exec "$@"
