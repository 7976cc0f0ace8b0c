#!/usr/bin/env bash
# Installs what the tests need into .venv-test (or $VENV) and checks everything: lint, types, import
# contracts, tests. `--all` adds the slow tests; what follows goes to pytest. Ends with a summary.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/common.sh

VENV=${VENV:-.venv-test}
marks='not slow'
if [ "${1:-}" = --all ]; then
    marks=''
    shift
fi

STEP_PID=''
trap '[ -z "$STEP_PID" ] || end_process "$STEP_PID"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

failed=0 summary=''

# check NAME COMMAND...: runs it, shows its output, notes for the summary how it went.
check() {
    local name=$1 start=$SECONDS word=passed
    shift
    say '' "=== $name"
    "$@" || word=FAILED
    [ "$word" = passed ] || failed=1
    summary+=$(printf '%-18s %s  %4d s' "$name" "$word" $((SECONDS - start)))$'\n'
}

say "=== install"
mkdir -p results
make_venv "$VENV"
install_once "$VENV" results/test-install.log -e '.[serve,mpich,test,dev]'
PATH=$(cd "$VENV/bin" && pwd):$PATH

check lint ruff check
check format ruff format --check
check types mypy
check 'import contracts' lint-imports --no-logo
# Modules side by side, for many tests only wait; the tests of one module share servers.
check tests python -m pytest -q -n 2 --dist loadscope --durations=15 ${marks:+-m "$marks"} "$@"

say '' "=== summary ($SECONDS s)"
printf '%s' "$summary"
exit "$failed"
