#!/usr/bin/env bash
# Checks two servers behind each router of deploy/scale-out.md but Ray Serve. The routers come from
# PyPI, into a temporary environment.
#
# Requirements: `cargo build --release --workspace`, and Python 3.10 or later. The script leaves no
# process, file or package behind. With `--short`, it checks one policy of each router.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
cd "$here/../../.."

export NO_PROXY=127.0.0.1 no_proxy=127.0.0.1
bin="${CARGO_TARGET_DIR:-target}/release"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check \
    'openai==2.*' 'vllm-router==0.1.17' 'smg==1.13.*'
for router in vllm-router smg; do
    "$work/venv/bin/python" "$here/check.py" --bin "$bin" --router "$router" "$@"
done
