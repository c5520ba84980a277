#!/usr/bin/env bash
# Runs Claude Code and Codex, as npm installs them, against a server. Each answers one question in
# its own way, with its own instructions and tools; of Claude Code's tools, with three. The model
# has random weights and much context, so only the conversation between client and server is
# checked, not what is said.
#
# Requirements: `cargo build --release --workspace`, Python 3, and Node.js 18 or later with npm. The
# packages have 900 MB. The script leaves no process behind, and no file outside of
# $STERNA_PACKAGES. With `--install`, it only installs packages there.
set -euo pipefail
cd "$(dirname "$0")/../../.."

. tests/clients/packages.sh
export NO_PROXY=127.0.0.1 no_proxy=127.0.0.1
work="$(mktemp -d)"
server=""

# On every exit: ends the server. After a failure, also prints what was said.
finish() {
    local status=$?
    trap - EXIT
    [ -n "$server" ] && kill -KILL "$server" 2>/dev/null || true
    if [ "$status" -ne 0 ]; then
        tail -n 40 "$work"/*.log "$work"/*.json >&2 || true
    fi
    rm -rf "$work" "$temporary_packages"
    exit "$status"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

fail() {
    printf 'tests/clients/agents: %s\n' "$*" >&2
    exit 1
}

command -v npm >/dev/null || fail "npm is missing; install Node.js with npm"
node_packages agents '@anthropic-ai/claude-code@2.1.197' '@openai/codex@0.169.0'
[ "${1:-}" = --install ] && exit

# Many tokens end an answer, so that answers of random words are short.
"$bin/sterna" synthesize --shape tiny "$work/model"
python3 - "$work/model" <<'PYTHON'
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
def change(name, **fields):
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
change("config.json", max_position_embeddings=131072)
change("generation_config.json", eos_token_id=sorted({2041, 2042, *range(0, 4096, 8)}))
PYTHON

"$bin/sterna" --port 0 --kv-memory 1GiB --max-model-len 65536 "$work/model" \
    >"$work/server.log" 2>&1 &
server=$!
url=""
for attempt in $(seq 600); do
    url="$(grep -o -m1 'http://127\.0\.0\.1:[0-9]*' "$work/server.log" | head -n1 || true)"
    [ -n "$url" ] && break
    kill -0 "$server" 2>/dev/null || fail "the server exited during its start"
    sleep 0.1
done
[ -n "$url" ] || fail "the server was not ready after ${attempt}00 ms"

# The clients see nothing of this user: no configuration, no keys.
mkdir "$work/home" "$work/project"
agent() {
    (cd "$work/project" && env -i HOME="$work/home" PATH="$PATH" NO_PROXY=127.0.0.1 \
        timeout 600 env "$@" </dev/null)
}

printf 'Codex\n'
provider=model_providers.sterna
agent STERNA_KEY=none "$node_folder/node_modules/.bin/codex" exec --json --skip-git-repo-check \
    --sandbox read-only -c model=default -c model_provider=sterna -c "$provider.name=sterna" \
    -c "$provider.base_url=\"$url/v1\"" -c "$provider.wire_api=\"responses\"" \
    -c "$provider.env_key=STERNA_KEY" 'Say hello.' >"$work/codex.json" \
    2>"$work/codex.log" || fail "Codex ended with $?"
grep -q '"type":"turn.completed"' "$work/codex.json" || fail "Codex did not complete its turn"

printf 'Claude Code\n'
claude="$(echo "$node_folder"/node_modules/@anthropic-ai/claude-code-*/claude)"
agent ANTHROPIC_BASE_URL="$url" ANTHROPIC_AUTH_TOKEN=none ANTHROPIC_MODEL=default \
    ANTHROPIC_SMALL_FAST_MODEL=default CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 \
    DISABLE_AUTOUPDATER=1 DISABLE_TELEMETRY=1 \
    "$claude" -p 'Say hello.' --tools Bash,Read,Edit --output-format json >"$work/claude.json" \
    2>"$work/claude.log" || fail "Claude Code ended with $?"
python3 - "$work/claude.json" <<'PYTHON'
import json, sys
result = json.load(open(sys.argv[1]))
assert result["type"] == "result" and not result["is_error"], result
assert result["usage"]["output_tokens"] > 0, result
PYTHON

# Neither of them may have met an error and gone on.
if grep -E 'endpoint="/v1/(responses|messages)" status=[45]' "$work/server.log"; then
    fail "the server refused a request"
fi
for path in responses messages; do
    grep -q "endpoint=\"/v1/$path\" status=200" "$work/server.log" || fail "no request to $path"
done
kill -TERM "$server"
wait "$server" || fail "the server did not drain"
server=""
printf 'both agents had their answers\n'
