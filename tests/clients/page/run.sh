#!/usr/bin/env bash
# Checks the chat page of a release server in headless Chromium. Screenshots go to target/page/. An
# argument selects the checks whose names contain it.
#
# Requirements: `cargo build --release` and, unless the script runs as root on Debian or Ubuntu and
# may install them, Node.js 18 or later with npm, and Chromium. $CHROMIUM names a browser that is
# not in the path. Everything else goes into a temporary folder.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
cd "$here/../../.."

export NO_PROXY=127.0.0.1 no_proxy=127.0.0.1
target="${CARGO_TARGET_DIR:-target}"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

fail() {
    printf 'tests/clients/page: %s\n' "$*" >&2
    exit 1
}

# install PACKAGES...: installs packages of the system, or fails if it cannot.
install() {
    [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null || return 1
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$@" >/dev/null
}

# browser: prints the path of a Chromium, if there is one.
browser() {
    local name
    for name in "${CHROMIUM:-}" chromium-headless-shell chromium chromium-browser google-chrome; do
        [ -n "$name" ] && command -v "$name" && return
    done
    return 1
}

[ -x "$target/release/sterna" ] ||
    fail "$target/release/sterna is missing; run: cargo build --release"
command -v npm >/dev/null || install nodejs npm || fail "install Node.js 18 or later, with npm"

npm install --silent --no-audit --no-fund --prefix "$work" playwright-core@1 axe-core@4
if ! chromium="$(browser)"; then
    # Debian's package has what Chromium needs. Elsewhere Playwright downloads its own build.
    install chromium-headless-shell ||
        "$work/node_modules/.bin/playwright-core" install chromium-headless-shell ||
        fail "install Chromium, or set CHROMIUM to its path"
    chromium="$(browser || true)"
fi

mkdir -p "$target/page"
STERNA="$target/release/sterna" CHROMIUM="$chromium" PACKAGES="$work" OUT="$target/page" \
    node "$here/check.mjs" "$@"
