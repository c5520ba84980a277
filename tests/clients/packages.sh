# Installs what the checks of this folder need, for the scripts that read this file.
#
# Packages go into folders of $STERNA_PACKAGES and stay there for the next run. If the variable is
# not set, they go into a temporary folder, which the caller removes: $packages.
#
# The servers are those of $STERNA_BIN, or of the release build.

bin="$(realpath -m "${STERNA_BIN:-${CARGO_TARGET_DIR:-target}/release}")"
if [ -n "${STERNA_PACKAGES:-}" ]; then
    mkdir -p "$STERNA_PACKAGES"
    packages="$(realpath "$STERNA_PACKAGES")"
    temporary_packages=""
else
    packages="$(mktemp -d)"
    temporary_packages="$packages"
fi

# once FOLDER PACKAGES... -- COMMAND...: runs the command, unless it has already filled the folder
# with these packages.
once() {
    local folder="$packages/$1" list=""
    shift
    while [ "$1" != -- ]; do
        list+="$1 "
        shift
    done
    shift
    [ "$(cat "$folder/packages.txt" 2>/dev/null)" = "$list" ] && return
    rm -rf "$folder"
    mkdir -p "$folder"
    "$@" "$folder" $list
    printf '%s' "$list" >"$folder/packages.txt"
}

# python_packages NAME PACKAGES...: makes an environment of Python with these packages. Sets
# `python`.
python_packages() {
    local name="python-$1"
    shift
    once "$name" "$@" -- make_environment
    python="$packages/$name/bin/python"
}

make_environment() {
    local folder="$1"
    shift
    python3 -m venv "$folder"
    "$folder/bin/pip" install --quiet --disable-pip-version-check 'uv==0.*'
    UV_CACHE_DIR="$folder/cache" "$folder/bin/uv" pip install --quiet --python \
        "$folder/bin/python" "$@"
    rm -rf "$folder/cache"
}

# node_packages NAME PACKAGES...: installs these packages of npm. Sets `node_folder`.
node_packages() {
    local name="node-$1"
    shift
    once "$name" "$@" -- install_for_node
    node_folder="$packages/$name"
}

install_for_node() {
    local folder="$1"
    shift
    npm install --silent --no-audit --no-fund --ignore-scripts --prefix "$folder" \
        --cache "$folder/cache" "$@"
    rm -rf "$folder/cache"
}

# system_packages PACKAGES...: installs packages of Debian, or fails if this user may not.
system_packages() {
    [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null || return 1
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$@" >/dev/null
}
