#!/usr/bin/env bash
# Starts a server, Prometheus and the load test, and checks that every query of the dashboards and
# of the rules returns data.
#
# Requirements: `cargo build --release --workspace`, Python 3.10 or later, Node.js with npm, and
# prometheus, promtool and amtool. If one of the last three is missing, the script unpacks Debian's
# packages. It installs nothing, and leaves no process behind, and no file outside of
# $STERNA_PACKAGES.
#
# --keep goes on running until Ctrl-C. --pictures draws dashboards/*.svg. --install only fetches the
# packages.
set -euo pipefail
cd "$(dirname "$0")/../../.."

. tests/clients/packages.sh
work="$(mktemp -d)"
trap 'rm -rf "$work" "$temporary_packages"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# unpack FOLDER PACKAGES...: unpacks packages of Debian.
unpack() (
    cd "$1"
    shift
    apt-get download -qq "$@" 2>/dev/null || { apt-get update -qq && apt-get download -qq "$@"; }
    for package in *.deb; do dpkg -x "$package" .; done
    rm -- *.deb
)
for program in prometheus promtool amtool; do
    command -v "$program" >/dev/null && continue
    once prometheus prometheus prometheus-alertmanager -- unpack
    PATH="$packages/prometheus/usr/bin:$PATH"
    break
done
# The shape of the dashboards' JSON, as Grafana describes it.
node_packages prometheus '@grafana/schema@11.6.0' 'typescript@5.8.3'
[ "${1:-}" = --install ] && exit

node tests/clients/prometheus/schema/check.mjs dashboards "$node_folder/dashboards.ts"
"$node_folder/node_modules/.bin/tsc" --noEmit --strict --skipLibCheck --module esnext \
    --moduleResolution bundler "$node_folder/dashboards.ts"

amtool check-config dashboards/alertmanager.yml
promtool check config dashboards/prometheus.yml # And the rules that it names.
promtool test rules dashboards/rules_test.yml
# Bash runs a trap at once only if it waits for a background process.
trap 'kill -TERM "$queries"; wait "$queries" || true; exit 143' TERM
trap 'kill -TERM "$queries"; wait "$queries" || true; exit 130' INT
python3 tests/clients/prometheus/queries.py --bin "$bin" --work "$work" "$@" &
queries=$!
wait "$queries"
