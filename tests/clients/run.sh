#!/usr/bin/env bash
# Checks a release server with clients that other people wrote: the OpenAI SDK in a throw-away environment, then the load tester.
# Needs `cargo build --release --workspace` and Python 3.10 or later. Leaves nothing behind: no process, no file, no package.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
cd "$here/../.."

export NO_PROXY=127.0.0.1 no_proxy=127.0.0.1
bin="${CARGO_TARGET_DIR:-target}/release"
work="$(mktemp -d)"
servers=()

# Whatever happened: no server outlives this script, and a failed run shows what the servers said.
finish() {
    local status=$?
    trap - EXIT
    local pid
    for pid in "${servers[@]}"; do
        kill -KILL "$pid" 2>/dev/null || true
    done
    if [ "$status" -ne 0 ]; then
        tail -n 40 "$work"/*.log >&2 || true
    fi
    rm -rf "$work"
    exit "$status"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

fail() {
    printf 'tests/clients: %s\n' "$*" >&2
    exit 1
}

# start NAME FLAGS...: starts a server on a free port and waits until it is ready; sets `url` and `pid`.
start() {
    local log="$work/$1.log"
    shift
    "$bin/sterna" --port 0 "$@" >"$log" 2>&1 &
    pid=$!
    servers+=("$pid")
    local attempt
    for attempt in $(seq 300); do
        url="$(grep -o -m1 'http://127\.0\.0\.1:[0-9]*' "$log" | head -n1 || true)"
        if [ -n "$url" ] && ready "$url"; then
            return
        fi
        kill -0 "$pid" 2>/dev/null || fail "the server ended while starting"
        sleep 0.1
    done
    fail "the server was not ready after ${attempt}00 ms"
}

ready() {
    python3 - "$1" <<'PYTHON' 2>/dev/null
import sys, urllib.request
urllib.request.urlopen(sys.argv[1] + "/ready", timeout=2)
PYTHON
}

# gone PID: waits until the process has drained, and expects exit code 0.
gone() {
    local attempt
    for attempt in $(seq 200); do
        if ! kill -0 "$1" 2>/dev/null; then
            local status=0
            wait "$1" || status=$?
            [ "$status" -eq 0 ] || fail "after SIGTERM the server exited with $status"
            return
        fi
        sleep 0.1
    done
    fail "the server was still there ${attempt}00 ms after SIGTERM"
}

[ -x "$bin/sterna" ] && [ -x "$bin/sterna-loadtest" ] || fail "build first: cargo build --release --workspace"

python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check 'openai==2.*'

start roomy
roomy_url="$url" roomy_pid="$pid"
# One request runs and one waits: the next is one too many.
start tiny --max-running 1 --max-queued 1
tiny_url="$url" tiny_pid="$pid"

"$work/venv/bin/python" "$here/openai_sdk.py" --url "$roomy_url" --tiny-url "$tiny_url" --tiny-pid "$tiny_pid"
gone "$tiny_pid" # The last check of openai_sdk.py sends it SIGTERM.

printf '\nsterna-loadtest, 16 clients\n'
"$bin/sterna-loadtest" --url "$roomy_url" --clients 16 --requests 64 --max-tokens 32 --ignore-eos --shared-prefix-tokens 32

kill -TERM "$roomy_pid"
gone "$roomy_pid"
printf '\nboth servers drained and exited with 0\n'
