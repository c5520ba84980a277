#!/usr/bin/env bash
# Checks two servers behind each router of deploy/scale-out.md but Ray Serve, and compares servers
# behind vllm-router with their simulation. The routers come from PyPI, into a temporary
# environment.
#
# Requirements: `cargo build --release --workspace`, and Python 3.10 or later. The script leaves no
# process behind, and no file outside of $STERNA_PACKAGES. With `--short`, it checks one policy of
# each router, and simulates nothing. With `--install`, it only installs packages.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
cd "$here/../../.."

. tests/clients/packages.sh
export NO_PROXY=127.0.0.1 no_proxy=127.0.0.1
trap 'rm -rf "$temporary_packages"' EXIT

python_packages routers 'openai==2.*' 'vllm-router==0.1.17' 'smg==1.13.*'
[ "${1:-}" = --install ] && exit
for router in vllm-router smg; do
    "$python" "$here/check.py" --bin "$bin" --router "$router" "$@"
done
# Its times need a machine that does little else.
[ "${1:-}" = --short ] || "$python" "$here/simulated.py" --bin "$bin"
