#!/usr/bin/env bash
# Measures one server with AIPerf and with the load test, and compares their figures. AIPerf comes
# from PyPI and has 900 MB.
#
# Requirements: `cargo build --release --workspace`, Python 3.10 or later, and two cores that do
# nothing else. The script leaves no process behind, and no file outside of $STERNA_PACKAGES. With
# `--install`, it only installs packages there.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
cd "$here/../../.."

. tests/clients/packages.sh
export NO_PROXY=127.0.0.1 no_proxy=127.0.0.1
trap 'rm -rf "$temporary_packages"' EXIT

python_packages aiperf 'aiperf==0.13.*'
[ "${1:-}" = --install ] && exit
"$python" "$here/compare.py" --bin "$bin" --tokenizer src/demo
