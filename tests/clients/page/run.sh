#!/usr/bin/env bash
# Checks the chat page of a server in headless Chromium. Screenshots go to target/page/. An argument
# selects the checks whose names contain it. With `--install`, the script only installs packages.
# With `--pictures`, it draws the README's pictures into tests/clients/page/pictures.
#
# Requirements: `cargo build --release` and, unless the script runs as root on Debian or Ubuntu and
# may install them, Node.js 18 or later with npm, and Chromium. $CHROMIUM names a browser that is
# not in the path. Everything else goes into $STERNA_PACKAGES or a temporary folder.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
cd "$here/../../.."

. tests/clients/packages.sh
export NO_PROXY=127.0.0.1 no_proxy=127.0.0.1
target="${CARGO_TARGET_DIR:-target}"
trap 'rm -rf "$temporary_packages"' EXIT

fail() {
    printf 'tests/clients/page: %s\n' "$*" >&2
    exit 1
}

# browser: prints the path of a Chromium, if there is one.
browser() {
    local name
    for name in "${CHROMIUM:-}" chromium-headless-shell chromium chromium-browser google-chrome; do
        [ -n "$name" ] && command -v "$name" && return
    done
    return 1
}

command -v npm >/dev/null || system_packages nodejs npm ||
    fail "install Node.js 18 or later, with npm"
node_packages page playwright-core@1 axe-core@4
if ! chromium="$(browser)"; then
    # Debian's package has what Chromium needs. Elsewhere Playwright downloads its own build.
    system_packages chromium-headless-shell ||
        "$node_folder/node_modules/.bin/playwright-core" install chromium-headless-shell ||
        fail "install Chromium, or set CHROMIUM to its path"
    chromium="$(browser || true)"
fi
[ "${1:-}" = --install ] && exit

[ -x "$bin/sterna" ] || fail "$bin/sterna is missing; run: cargo build --release"
mkdir -p "$target/page"
export STERNA="$bin/sterna" CHROMIUM="$chromium" PACKAGES="$node_folder" OUT="$target/page"
if [ "${1:-}" = --pictures ]; then
    OUT="$PWD/tests/clients/page/pictures" node "$here/pictures.mjs"
else
    node "$here/check.mjs" "$@"
fi
