# Which checks .ci/run may skip, for .ci/run, which reads this file.
#
# Such a check is skipped if its inputs are those with which it last passed. .ci/checked names them,
# a line for each: the check, a path, and git's name for the content of the path, committed or not.
# A check runs if one of its lines is missing, superfluous or names other content. So a merge may
# keep either side of the file, and a mistake in it only makes a check run. A line that claims a
# success which never was is in the diff of its change, and .ci/nightly skips nothing.

# How each check is built and run.
run="Cargo.toml Cargo.lock .cargo .ci/run .ci/inputs.sh .ci/steps.sh tests/clients/packages.sh"

# The page shows what the API says, so it is checked with the API and its texts. The routers and
# Prometheus are checked for their own part of the server. The SDKs meet the rest of the server in
# every run, and .ci/nightly checks all with all.
declare -A paths=(
    [instructions]="Cargo.toml Cargo.lock .cargo benches/instructions
        benches/record/instructions.txt kernels scheduler/src tests/random"
    [mutants]="scheduler/src scheduler/tests/simulation src/text tests/jinja tests/mutants"
    [page]="$run src/api src/text tests/clients/page"
    [prometheus]="$run dashboards loadtest src/metrics tests/clients/prometheus"
    [routers]="$run deploy src/kv_events tests/clients/routers"
)

# inputs: prints the lines of .ci/checked for the files of now.
# shellcheck disable=SC2046,SC2086 # Several paths.
inputs() {
    local index="$logs/index" tree check format
    cp "$(git rev-parse --git-path index)" "$index" || return
    GIT_INDEX_FILE="$index" git add --all -- ${paths[*]} || return
    tree="$(GIT_INDEX_FILE="$index" git write-tree)" || return
    for check in "${!paths[@]}"; do
        format="$check %(path) %(objectname)"
        # The mutants of a file run if this file has changed.
        [ "$check" = mutants ] && set -- -r || set --
        git ls-tree "$@" --format="$format" "$tree" -- ${paths[$check]} || return
    done | LC_ALL=C sort || return
    echo "instructions rustc $(rustc --version | tr ' ' _)"
}

now="$(inputs)"
checked="$(cat .ci/checked 2>/dev/null || true)"

# lines_of CHECK LINES: prints the lines of a check, in order.
lines_of() {
    grep "^$1 " <<<"$2" | LC_ALL=C sort
}

# changed CHECK: prints the paths of the check's inputs that are not those of .ci/checked.
changed() {
    LC_ALL=C comm -3 <(lines_of "$1" "$checked") <(lines_of "$1" "$now") | awk '{ print $2 }' |
        LC_ALL=C sort -u
}

# is_due CHECK: whether the check must run. Says why.
is_due() {
    local own
    own="$(lines_of "$1" "$now")"
    if [ -n "$own" ] && [ "$own" = "$(lines_of "$1" "$checked")" ]; then
        echo "$1: skipped, since no input has changed since it passed"
        return 1
    fi
    echo "$1: runs, since $(changed "$1" | wc -l) inputs have changed since it passed:" \
        "$(changed "$1" | sed -n 1p) ..."
}

# record_success: writes .ci/checked at the end of a run in which each check passed or was skipped.
record_success() {
    if [ "$(inputs)" != "$now" ]; then
        echo "files have changed during the run, so .ci/checked stays as it is"
        return
    fi
    local header="# Written by .ci/run. .ci/inputs.sh says what the lines mean."
    printf '%s\n' "$header" "$now" >.ci/checked
    [ -z "$(git status --porcelain -- .ci/checked)" ] || echo "commit .ci/checked with the change"
}
