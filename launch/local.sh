#!/usr/bin/env bash
# fastserve-hpc on ranks of this machine: launch/local.sh -n 2 serve --pp 2
# Everything after -n N is fastserve-hpc's command line. VENV names another environment than .venv;
# BIND=1 gives each rank cores and a GPU of its own (bind_rank.sh).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

ranks=1
if [ "${1:-}" = -n ]; then
    ranks=${2:?"-n needs a number of ranks"}
    shift 2
fi
if [ $# = 0 ]; then
    sed -n '2,4s/^# //p' "$0"
    exit 2
fi

venv=${VENV:-$here/../.venv}
program=$venv/bin/fastserve-hpc
[ -x "$program" ] || program=$(command -v fastserve-hpc) ||
    { echo "error: no fastserve-hpc in $venv or on PATH: run launch/quickstart.sh first, or set VENV" >&2; exit 2; }
[ "$ranks" != 1 ] || exec "$program" "$@"

launcher=$(dirname "$program")/mpiexec
[ -x "$launcher" ] || launcher=$(command -v mpiexec) ||
    { echo "error: no mpiexec in $venv or on PATH: pip install 'fastserve-hpc[mpich]', or load your site's MPI" >&2; exit 2; }

options=()
if "$launcher" --version 2>&1 | grep -qi 'open.\?mpi\|open-mpi'; then
    options+=(--oversubscribe)
    [ "$(id -u)" != 0 ] || options+=(--allow-run-as-root)
fi
bind=()
[ "${BIND:-0}" = 0 ] || bind+=("$here/bind_rank.sh")
exec "$launcher" "${options[@]}" -n "$ranks" "${bind[@]}" "$program" "$@"
