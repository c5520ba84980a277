#!/usr/bin/env bash
# Checks a release server with real clients: the OpenAI SDK in a temporary environment, then the
# load test.
#
# Requirements: `cargo build --release --workspace` and Python 3.10 or later. The script leaves no
# process, file or package behind.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
cd "$here/../.."

export NO_PROXY=127.0.0.1 no_proxy=127.0.0.1
bin="${CARGO_TARGET_DIR:-target}/release"
work="$(mktemp -d)"
servers=()

# On every exit: ends all servers. After a failure, also prints the ends of their logs.
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

# start NAME FLAGS...: starts a server on a free port and waits until it is ready. Sets `url` and
# `pid`.
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
        kill -0 "$pid" 2>/dev/null || fail "the server exited during its start"
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

# await_exit PID: waits until the server has drained, and checks that its exit code is 0.
await_exit() {
    local attempt
    for attempt in $(seq 200); do
        if ! kill -0 "$1" 2>/dev/null; then
            local status=0
            wait "$1" || status=$?
            [ "$status" -eq 0 ] || fail "the server exited with $status after SIGTERM"
            return
        fi
        sleep 0.1
    done
    fail "the server was still running ${attempt}00 ms after SIGTERM"
}

for binary in sterna sterna-loadtest; do
    [ -x "$bin/$binary" ] ||
        fail "$bin/$binary is missing; run: cargo build --release --workspace"
done

python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check 'openai==2.*'

start large
large_url="$url" large_pid="$pid"
# This server runs one request and queues one. It rejects the next one.
start tiny --max-running 1 --max-queued 1
tiny_url="$url" tiny_pid="$pid"

"$work/venv/bin/python" "$here/openai_sdk.py" \
    --url "$large_url" --tiny-url "$tiny_url" --tiny-pid "$tiny_pid"
await_exit "$tiny_pid" # The last check of openai_sdk.py sends SIGTERM to this server.

printf '\nsterna-loadtest, 16 clients\n'
"$bin/sterna-loadtest" --url "$large_url" --clients 16 --requests 64 --max-tokens 32 \
    --ignore-eos --shared-prefix-tokens 32

kill -TERM "$large_pid"
await_exit "$large_pid"
printf '\nboth servers drained and exited with 0\n'
