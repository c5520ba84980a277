#!/usr/bin/env bash
# Starts a release server, Prometheus and the load test, and checks that every query of the
# dashboards and of the rules returns data.
#
# Requirements: `cargo build --release --workspace`, Python 3.10 or later, Node.js with npm, and
# prometheus, promtool and amtool. If one of the last three is missing, the script unpacks Debian's
# packages into a temporary folder. It installs nothing, and leaves no process or file behind.
#
# --keep goes on running until Ctrl-C. --pictures draws dashboards/*.svg.
set -euo pipefail
cd "$(dirname "$0")/../../.."

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

for program in prometheus promtool amtool; do
    command -v "$program" >/dev/null && continue
    (
        cd "$work"
        packages="prometheus prometheus-alertmanager"
        apt-get download -qq $packages 2>/dev/null ||
            { apt-get update -qq && apt-get download -qq $packages; }
        for package in *.deb; do dpkg -x "$package" package; done
    )
    PATH="$work/package/usr/bin:$PATH"
    break
done

# The shape of the dashboards' JSON, as Grafana describes it.
npm install --silent --no-audit --no-fund --ignore-scripts --prefix "$work/node" \
    --cache "$work/npm" '@grafana/schema@11.6.0' 'typescript@5.8.3'
node tests/clients/prometheus/schema/check.mjs dashboards "$work/node/dashboards.ts"
"$work/node/node_modules/.bin/tsc" --noEmit --strict --skipLibCheck --module esnext \
    --moduleResolution bundler "$work/node/dashboards.ts"

amtool check-config dashboards/alertmanager.yml
promtool check config dashboards/prometheus.yml # And the rules that it names.
promtool test rules dashboards/rules_test.yml
# Bash runs a trap at once only if it waits for a background process.
trap 'kill -TERM "$queries"; wait "$queries" || true; exit 143' TERM
trap 'kill -TERM "$queries"; wait "$queries" || true; exit 130' INT
python3 tests/clients/prometheus/queries.py \
    --bin "${CARGO_TARGET_DIR:-target}/release" --work "$work" "$@" &
queries=$!
wait "$queries"
