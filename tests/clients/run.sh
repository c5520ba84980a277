#!/usr/bin/env bash
# Checks a server with real clients: the SDKs of OpenAI and Anthropic, clients that build on
# OpenAI's API, the requests of Open WebUI, lm-eval and schemathesis in an environment of their own,
# two SDKs of Node, then the load test.
#
# Requirements: `cargo build --release --workspace`, Python 3.10 or later, and Node.js 18 or later
# with npm. The script leaves no process behind, and no file outside of $STERNA_PACKAGES. With
# `--install`, it only installs packages there.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
cd "$here/../.."

. tests/clients/packages.sh
export NO_PROXY=127.0.0.1 no_proxy=127.0.0.1
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
    rm -rf "$work" "$temporary_packages"
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

command -v npm >/dev/null || fail "npm is missing; install Node.js with npm"
# lm-eval takes its tokenizer from transformers, which needs no torch for that.
python_packages clients 'openai==2.*' 'anthropic==2.*' 'openapi-spec-validator==0.9.*' \
    'schemathesis==4.*' 'lm_eval[api]==0.4.13' 'transformers==5.*' 'litellm[proxy]==1.106.*' \
    'langchain-openai==1.7.*' 'pydantic-ai-slim[openai]==2.31.*' 'llm==0.32.*' 'aiohttp==3.*'
node_packages clients 'openai@6' 'ai@6' '@ai-sdk/openai-compatible@2' 'zod@4'
[ "${1:-}" = --install ] && exit

for binary in sterna sterna-loadtest; do
    [ -x "$bin/$binary" ] ||
        fail "$bin/$binary is missing; run: cargo build --release --workspace"
done

start large
large_url="$url" large_pid="$pid"
# This server runs one request and queues one. It rejects the next one.
start tiny --max-running 1 --max-queued 1
tiny_url="$url" tiny_pid="$pid"

"$python" "$here/openai_sdk.py" \
    --url "$large_url" --tiny-url "$tiny_url" --tiny-pid "$tiny_pid"
printf '\ntools, through the OpenAI SDK\n'
"$python" "$here/openai_tools.py" --url "$large_url"
printf '\nresponses, through the OpenAI SDK\n'
"$python" "$here/openai_responses.py" --url "$large_url"
printf '\nAnthropic SDK\n'
"$python" "$here/anthropic_sdk.py" --url "$large_url"
await_exit "$tiny_pid" # The last check of openai_sdk.py sends SIGTERM to this server.

printf '\nlitellm, langchain-openai, pydantic-ai and llm\n'
TMPDIR="$work" "$python" "$here/python_sdks.py" --url "$large_url"

printf '\nthe proxy of litellm\n'
TMPDIR="$work" "$python" "$here/litellm_proxy.py" --url "$large_url"

printf '\nthe requests of Open WebUI\n'
"$python" "$here/open_webui.py" --url "$large_url"

printf '\nembeddings, through the OpenAI SDK\n'
start embedding --model tests/fixtures/embedding-qwen3
"$python" "$here/openai_embeddings.py" --url "$url"
kill -TERM "$pid"
await_exit "$pid"

printf '\nopenai and ai on Node\n'
cp "$here/node_sdks.mjs" "$node_folder" # Node looks for packages beside the file.
node "$node_folder/node_sdks.mjs" "$large_url"

printf '\nlm-eval, with log-likelihoods\n'
TMPDIR="$work" "$python" "$here/lm_eval_scores.py" --url "$large_url"

printf '\nschemathesis, against /openapi.json\n'
start documented --max-model-len 96 # So that answers without a maximum length are short.
"$python" "$here/openapi.py" --url "$url"
kill -TERM "$pid"
await_exit "$pid"

printf '\nsterna-loadtest, 16 clients\n'
"$bin/sterna-loadtest" --url "$large_url" --clients 16 --requests 64 --max-tokens 32 \
    --ignore-eos --shared-prefix-tokens 32

printf '\nsterna-loadtest, against the histograms of a server with a queue\n'
# However slow the machine is, no request waits too long.
start queued --max-running 8 --max-queued-seconds 600
"$bin/sterna-loadtest" --url "$url" --clients 64 --requests 400 --ignore-eos \
    --server-histograms --json >"$work/agreement.json"
python3 - "$work/agreement.json" <<'PYTHON'
import json, sys
report = json.load(open(sys.argv[1]))
assert report["complete"] == 400, report
for latency in "time_to_first_token", "end_to_end":
    clients, server = report[f"{latency}_seconds"], report["server"][latency]
    print(f"{latency}: clients {clients['mean']:.3f} s, server {server['mean']:.3f} s")
    assert server["count"] == 400 and server["agrees"], (clients, server)
PYTHON
kill -TERM "$pid"
await_exit "$pid"

kill -TERM "$large_pid"
await_exit "$large_pid"
printf '\nall servers drained and exited with 0\n'
