#!/usr/bin/env bash
# Checks that recorded.json is what `transformers` writes. `--record` writes the file instead.
#
# `cargo test --lib recorded` compares the server's own templates with the file.
set -euo pipefail
cd "$(dirname "$0")"
. ../clients/packages.sh
trap 'rm -rf "$temporary_packages"' EXIT

python_packages jinja transformers==5.24.0 jinja2==3.1.6
case "${1:-}" in
--record) "$python" record.py ;;
*) "$python" record.py --check ;;
esac
