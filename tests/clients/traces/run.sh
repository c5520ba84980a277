#!/usr/bin/env bash
# Checks the traces, which are no default: the server sends them to the test, and then to the
# collector Rotel of PyPI, which sends them on to the test.
#
# Requirements: a Rust toolchain, and Python 3.10 or later. The script leaves no process behind, and
# no file outside of $STERNA_PACKAGES and the build. With `--install`, it only installs Rotel.
set -euo pipefail
cd "$(dirname "$0")/../../.."

. tests/clients/packages.sh
export NO_PROXY=127.0.0.1 no_proxy=127.0.0.1
trap 'rm -rf "$temporary_packages"' EXIT

python_packages rotel 'rotel==0.0.1a15'
[ "${1:-}" = --install ] && exit
rotel="$("$python" -c 'import rotel; print(rotel.__path__[0])')/rotel-agent"
cargo clippy --workspace --all-targets --locked --features otlp -- -D warnings
cargo test --locked --features otlp --lib traces
cargo test --locked --features otlp --test otlp
STERNA_ROTEL="$rotel" cargo test --locked --features otlp --test otlp
