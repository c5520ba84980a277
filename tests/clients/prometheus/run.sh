#!/usr/bin/env bash
# Starts a release server, Prometheus and the load test, and checks that every query of the
# dashboards and of the rules returns data.
#
# Requirements: `cargo build --release --workspace`, Python 3.10 or later, and prometheus and
# promtool. If one of the last two is missing, the script unpacks Debian's package into a temporary
# folder. It installs nothing, and leaves no process or file behind.
set -euo pipefail
cd "$(dirname "$0")/../../.."

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

if ! command -v prometheus >/dev/null || ! command -v promtool >/dev/null; then
    (
        cd "$work"
        apt-get download -qq prometheus 2>/dev/null ||
            { apt-get update -qq && apt-get download -qq prometheus; }
        dpkg -x prometheus_*.deb package
    )
    PATH="$work/package/usr/bin:$PATH"
fi

promtool check rules dashboards/rules.yml
promtool test rules dashboards/rules_test.yml
python3 tests/clients/prometheus/queries.py \
    --bin "${CARGO_TARGET_DIR:-target}/release" --work "$work" "$@"
