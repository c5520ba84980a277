#!/usr/bin/env bash
# Runs deploy/ray_serve.py with two servers of the demo model, and kills one of them.
#
# Requirements: `cargo build --release --workspace`, Python 3.10 or later, and two cores: Ray gives
# each server one. The packages have 410 MB. The script leaves no process behind, and no file
# outside of $STERNA_PACKAGES. With `--install`, it only installs packages.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
cd "$here/../../.."

. tests/clients/packages.sh
export NO_PROXY=127.0.0.1 no_proxy=127.0.0.1
export RAY_USAGE_STATS_ENABLED=0
# Ray's sockets have long names below this folder, and a socket's path has at most 107 bytes.
RAY_TMPDIR="$(mktemp -d /tmp/ray.XXXX)"
export RAY_TMPDIR
trap 'rm -rf "$RAY_TMPDIR" "$temporary_packages"' EXIT

python_packages ray 'ray[serve]==2.60.*' 'aiohttp==3.*' 'httpx==0.28.*'
[ "${1:-}" = --install ] && exit
# Ray writes a key into the home folder.
HOME="$RAY_TMPDIR" "$python" "$here/check.py" --bin "$bin" --deploy "$PWD/deploy"
