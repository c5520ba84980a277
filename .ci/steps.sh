# Steps with their times, for the scripts that read this file.

target="$(realpath -m "${CARGO_TARGET_DIR:-target}")"
export STERNA_PACKAGES="$target/ci/packages"
logs="$target/ci"
mkdir -p "$STERNA_PACKAGES"
took=()     # A line for each step that has ended.
step=""     # The step that runs now.
declare -A beside=() # The processes of steps that run beside it.

# step NAME: ends the step that runs, and begins another one.
step() {
    end_step
    step="$*"
    began=$SECONDS
    printf '\n== %s (begins after %s s)\n' "$step" "$SECONDS"
}

end_step() {
    [ -n "$step" ] || return 0
    took+=("$(printf '%5s s  %s' "$((SECONDS - began))" "$step")")
    printf -- '-- %s took %s s\n' "$step" "$((SECONDS - began))"
    step=""
}

# beside NAME COMMAND...: begins a step beside the others. Its output waits for `await NAME`.
beside() {
    local name="$1"
    shift
    (
        trap - TERM INT
        trap 'printf -- "-- %s took %s s\n" "$name" "$((SECONDS - began))"' EXIT
        began=$SECONDS
        "$@" # Without `||`: bash would ignore errors inside the command.
    ) >"$logs/$name.log" 2>&1 </dev/null &
    beside[$name]=$!
    printf '== %s begins after %s s, beside the others\n' "$name" "$SECONDS"
}

# await NAME: waits for a step beside the others, and prints its output. Fails if the step failed.
await() {
    local status=0
    wait "${beside[$1]}" || status=$?
    unset "beside[$1]"
    printf '\n== %s\n' "$1"
    cat "$logs/$1.log"
    local seconds
    seconds=$(tail -n1 "$logs/$1.log" | grep -o '[0-9]*' | tail -n1) || true
    took+=("$(printf '%5s s  %s, beside others' "$seconds" "$1")")
    return "$status"
}

# On every exit: ends the steps beside the others, and prints the times.
finish() {
    local status=$? name
    trap - EXIT
    for name in "${!beside[@]}"; do
        pkill -TERM -P "${beside[$name]}" || true
        kill -TERM "${beside[$name]}" 2>/dev/null || true
    done
    end_step
    printf '\n== times\n'
    printf '%s\n' "${took[@]}" "$(printf '%5s s  in all' "$SECONDS")"
    exit "$status"
}
trap finish EXIT
trap 'exit 143' TERM
trap 'exit 130' INT

# need PROGRAM PACKAGE: installs a package of Debian if a program is missing.
need() {
    command -v "$1" >/dev/null && return
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
        echo "$1 is missing; install it as root: apt-get install $2" >&2
        return 1
    fi
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$2"
}

# Installs all that the checks need.
install_all() {
    need valgrind valgrind
    need strace strace
    need npm npm
    local checks
    for checks in "" /page /routers /prometheus; do
        echo "tests/clients$checks"
        "tests/clients$checks/run.sh" --install
    done
}
