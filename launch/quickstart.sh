#!/usr/bin/env bash
# From a fresh clone to a served model: makes .venv, installs, serves SmolLM2-135M on two ranks, runs a batch
# file and asks a question at the same time, and shows how long everything took. A second run is quick.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/common.sh

VENV=${VENV:-.venv}
RESULTS=$PWD/results/quickstart
ENDPOINT=quickstart
READY_TIMEOUT_S=180

SERVER_PID='' BATCH_PID='' STEP_PID=''

clean_up() {
    local code=$? pid
    trap - EXIT INT TERM HUP
    for pid in "$STEP_PID" "$BATCH_PID" "$SERVER_PID"; do
        [ -z "$pid" ] || end_process "$pid"
    done
    exit "$code"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

fastserve() { "$VENV/bin/fastserve-hpc" "$@"; }

install() {
    mkdir -p "$RESULTS"
    make_venv "$VENV"
    install_once "$VENV" "$RESULTS/install.log" -e '.[serve,mpich]'
    "$VENV/bin/python" launch/kernels_note.py
}

start_server() {
    local log=$RESULTS/serve.log start=$SECONDS next=$((SECONDS + 5))
    say "- starting the server: mpiexec -n 2 fastserve-hpc serve --model smollm2-135m --pp 2"
    : >"$log"
    "$VENV/bin/mpiexec" -n 2 "$VENV/bin/fastserve-hpc" serve --model smollm2-135m --pp 2 --endpoint "$ENDPOINT" \
        >"$log" 2>&1 </dev/null &
    SERVER_PID=$!
    until grep -q '^ready ' "$log"; do
        if ! kill -0 "$SERVER_PID" 2>/dev/null || ((SECONDS - start > READY_TIMEOUT_S)); then
            tail -n 20 "$log" >&2
            fail "the server did not start; its output is in $log"
        fi
        sleep 0.1
        if ((SECONDS >= next)); then
            next=$((SECONDS + 5))
            say "  $((SECONDS - start)) s: loading"
        fi
    done
    say "  $(grep '^ready ' "$log") after $((SECONDS - start)) s"
}

start_batch() {
    say "- submitting a batch file of $(wc -l <launch/prompts.jsonl) prompts in the background"
    # Not by the function above: that would be a shell of its own, and BATCH_PID its pid.
    "$VENV/bin/fastserve-hpc" batch --endpoint "$ENDPOINT" --input launch/prompts.jsonl --output "$RESULTS/results.jsonl" \
        --overwrite --json --ttft >"$RESULTS/batch.json" 2>"$RESULTS/batch.log" </dev/null &
    BATCH_PID=$!
    until fastserve status --endpoint "$ENDPOINT" --json | grep -Eq '"(running|waiting)": [1-9]'; do
        kill -0 "$BATCH_PID" 2>/dev/null || break
    done
}

ask() {
    say "> $1"
    fastserve submit --endpoint "$ENDPOINT" --system "You answer questions in one short sentence." --max-tokens 40 \
        --stats "$RESULTS/interactive.jsonl" "$1" </dev/null
}

ask_meanwhile() {
    local written
    say "- asking questions in the foreground"
    rm -f "$RESULTS/interactive.jsonl"
    ask "What is the capital of France?"
    written=$(wc -l <"$RESULTS/results.jsonl")
    if kill -0 "$BATCH_PID" 2>/dev/null; then
        say "  (meanwhile the batch goes on: $written of $(wc -l <launch/prompts.jsonl) results so far)"
    else
        say "  (the batch has finished already)"
    fi
    ask "What is the chemical symbol of gold?"
    ask "How many days are in a week?"
}

wait_for_batch() {
    local next=$((SECONDS + 5)) code=0
    say "- waiting for the batch"
    while kill -0 "$BATCH_PID" 2>/dev/null; do
        sleep 0.1
        if ((SECONDS >= next)); then
            next=$((SECONDS + 5))
            say "  $(tail -n 1 "$RESULTS/batch.log")"
        fi
    done
    wait "$BATCH_PID" || code=$?
    BATCH_PID=
    if ((code != 0)); then
        cat "$RESULTS/batch.log" >&2
        fail "the batch ended with exit status $code"
    fi
}

stop_server() {
    local code=0
    say "- stopping the server"
    fastserve stop --endpoint "$ENDPOINT"
    wait "$SERVER_PID" || code=$?
    SERVER_PID=
    ((code == 0)) || fail "the server ended with exit status $code; its output is in $RESULTS/serve.log"
}

# A state directory of its own: this run neither sees nor disturbs servers that are running already.
export FASTSERVE_HPC_HOME=$RESULTS/state
unset FASTSERVE_HPC_ENDPOINT

install
start_server
start_batch
ask_meanwhile
wait_for_batch
"$VENV/bin/python" launch/quickstart_report.py "$RESULTS/batch.json" "$RESULTS/interactive.jsonl"
stop_server
own_venv=''
[ "$VENV" = .venv ] || own_venv="VENV=$VENV "
cat <<END

Results of the batch: ${RESULTS#"$PWD"/}/results.jsonl ($(wc -l <"$RESULTS/results.jsonl") lines)
All of it took $SECONDS s. To try next, in $PWD:
  ${own_venv}launch/local.sh -n 2 serve --pp 2   # a server on two ranks, until Ctrl-C
  $VENV/bin/fastserve-hpc chat        # in another terminal: talk to it
  $VENV/bin/fastserve-hpc batch --help   # run a file of your own
END
