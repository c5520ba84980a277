#!/usr/bin/env bash
# Measures Sterna beside llama.cpp: same machine, same model shape, same client, one run.
#
#   benches/peer/run.sh [--shape NAME] [--types LIST] [--env DIR] [--json FILE] [--repetitions N]
#                       [--threads N] [--alone] [--quick] [--keep]
#
# The script does the following:
#
# 1. It installs llama-cpp-python into a temporary virtual environment, compiled for this CPU.
# 2. It builds llama-server from the same source package. The package's own Python server is not
#    used, because it handles one request at a time.
# 3. It writes a shape with random ternary weights. The shape of BitNet b1.58 2B-4T: as Sterna's
#    checkpoint, and as TQ2_0 and Q4_0 GGUF files for llama.cpp (write_gguf.py). A shape of Bonsai:
#    as one Q2_0 GGUF file (groups of 64), which both servers load. The shape of Bonsai 2 2B, which
#    has recurrent layers: as a Q2_0 file, which both servers load, and as a Q4_0 file of the same
#    weights for llama.cpp (write_gguf.py). The shape of maple-preview, a mixture of experts: as one
#    TQ2_0 file, which both servers load.
# 4. It measures prefill, one stream and 16 streams through each server (compare.py), and 4 streams
#    of Bonsai 2 2B.
# 5. It prints a Markdown table.
#
# Flags:
#
#   --shape NAME     2b-4t (the default), bonsai-1.7b, bonsai-8b, bonsai-2-2b or maple
#   --types LIST     types of llama.cpp's files, separated by commas; all of the shape if omitted
#   --env DIR        keep environment, build and GGUF files in DIR for the next run (4 GB)
#   --json FILE      write all figures to FILE
#   --repetitions N  runs of each server; 3 if omitted
#   --threads N      compute threads of each server; 2 if omitted
#   --alone          measure prefill and one stream, not many clients at once
#   --quick          run every part once with few clients and tokens, to check that it works
#   --keep           keep the working folder, which has the servers' logs
#
# Without --env and --keep the script leaves no file and no process behind.
#
# Requirements: `cargo build --release --workspace`, gcc and g++, Python 3.9 or later, 8 GB of
# memory and 8 GB of disk (bonsai-8b: 12 and 24 GB; maple: 16 and 50 GB). The first run compiles for
# at least 10 minutes. A run takes about as long again.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
bin="${CARGO_TARGET_DIR:-$here/../../target}/release"

peer=0.3.36 # The version of llama-cpp-python.
# The GGUF library comes from the source package, because 0.19.0 lacks Q2_0. gguf brings the
# packages that it needs.
tools=(cmake==4.4.4 ninja==1.13.2 scikit-build-core==1.1.2 gguf==0.19.0)

fail() {
    printf 'benches/peer: %s\n' "$*" >&2
    exit 1
}

step() { printf '== %s\n' "$*" >&2; }

shape=2b-4t types="" env="" json="" keep="" quick="" alone="" repetitions=3 threads=2
while [ $# -gt 0 ]; do
    case "$1" in
    -h | --help)
        sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"
        exit
        ;;
    --shape | --types | --env | --json | --repetitions | --threads)
        [ $# -ge 2 ] || fail "$1 needs a value"
        declare "${1#--}=$2"
        shift 2
        ;;
    --keep | --quick | --alone)
        declare "${1#--}=yes"
        shift
        ;;
    *) fail "unknown flag $1; --help lists the flags" ;;
    esac
done

case "$shape" in
2b-4t) all_types=tq2_0,q4_0 clients=(16) ;;
bonsai-1.7b | bonsai-8b) all_types=q2_0 clients=(16) ;;
bonsai-2-2b) all_types=q2_0,q4_0 clients=(4 16) ;;
maple) all_types=tq2_0 clients=(4 16) ;;
*) fail "unknown shape $shape; --help lists the shapes" ;;
esac
IFS=, read -ra types <<<"${types:-$all_types}"
IFS=, read -ra all_types <<<"$all_types"
for type in "${types[@]}"; do
    [[ " ${all_types[*]} " = *" $type "* ]] ||
        fail "unknown type $type; the types of $shape are ${all_types[*]}"
done

for binary in sterna sterna-loadtest; do
    [ -x "$bin/$binary" ] || fail "$bin/$binary is missing; run: cargo build --release --workspace"
done
for tool in python3 gcc g++; do
    command -v "$tool" >/dev/null || fail "$tool is missing; install it"
done

work="$(mktemp -d)"
child=""

# On every exit: ends the child process and removes the working folder.
finish() {
    local status=$?
    trap - EXIT
    if [ -n "$child" ]; then
        kill -TERM -- "-$child" 2>/dev/null && wait "$child" || true
    fi
    if [ -n "$keep" ]; then
        step "kept the working folder: $work"
    else
        rm -rf "$work"
    fi
    exit "$status"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# run COMMAND...: runs the command in the background in its own process group, so that a signal to
# this script ends all of its processes.
run() {
    set -m
    "$@" &
    child=$!
    set +m
    local status=0
    wait "$child" || status=$?
    child=""
    return "$status"
}

env="${env:-$work/env}"
mkdir -p "$env"
env="$(cd "$env" && pwd)"

# The stages of the environment. An interrupted build continues with the files that are compiled.
source="$env/llama_cpp_python-$peer"
build="$env/build"

make_venv() {
    rm -rf "$env/venv"
    python3 -m venv "$env/venv"
    "$env/venv/bin/pip" install --quiet --disable-pip-version-check "${tools[@]}"
}

fetch_source() {
    rm -rf "$source" "$build"
    mkdir "$work/download"
    pip download --quiet --disable-pip-version-check --no-deps --no-build-isolation \
        --no-binary llama-cpp-python --dest "$work/download" "llama-cpp-python==$peer"
    tar -xzf "$work/download/llama_cpp_python-$peer.tar.gz" -C "$env"
}

# The package's build folder stays, so that llama-server compiles only what the package lacks.
build_peer() {
    local flags="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF"
    CMAKE_ARGS="$flags -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF" \
        pip install --quiet --disable-pip-version-check --no-build-isolation \
        --config-settings=build-dir="$build" "$source"
    cmake -DLLAMA_BUILD_TOOLS=ON -DLLAMA_BUILD_SERVER=ON "$build" >"$work/build.log"
    cmake --build "$build" --target llama-server >>"$work/build.log" || {
        tail -n 40 "$work/build.log" >&2
        return 1
    }
}

# remember NAME KEY COMMAND...: runs the command, unless it has run in this environment with this
# key.
remember() {
    local mark="$env/$1.done" key="$2"
    shift 2
    if [ "$(cat "$mark" 2>/dev/null)" = "$key" ]; then
        return
    fi
    rm -f "$mark"
    "$@"
    printf '%s\n' "$key" >"$mark"
}

# write_files CHECKPOINT: writes the checkpoint's shape as files of all types.
write_files() {
    local type
    for type in "${all_types[@]}"; do
        PYTHONPATH="$source/vendor/llama.cpp/gguf-py" "$env/venv/bin/python" \
            "$here/write_gguf.py" --model "$1" --type "$type" "$files/$type.gguf"
    done
}

# Writes the files of the Bonsai 2 shape. The floats that they are made of are removed.
write_equal_files() {
    "$bin/sterna" synthesize --shape "$shape" "$work/floats"
    write_files "$work/floats"
    rm -r "$work/floats"
}

# Writes the only file of a shape. The floats that it is made of are removed.
write_shared_file() {
    local type="${all_types[0]}"
    "$bin/sterna" synthesize --shape "$shape" "$work/floats"
    "$bin/sterna" convert "$work/floats" "$files/$type.gguf" --layout "$type" --force
    rm -r "$work/floats"
}

step "llama-cpp-python $peer"
compiler="$(gcc -dumpfullversion)"
export PATH="$env/venv/bin:$PATH"
export CMAKE_BUILD_PARALLEL_LEVEL="${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}"
run remember venv "${tools[*]}" make_venv
run remember source "$peer" fetch_source
cpu="$(grep -m1 '^flags' /proc/cpuinfo | sha256sum)"
run remember target "gcc $compiler, $cpu" rm -rf "$build" "$env/build.done"
run remember build "$peer" build_peer

step "files of the shape $shape"
files="$env/$shape"
mkdir -p "$files"
case "$shape" in
2b-4t)
    model="$work/2b-4t"
    run "$bin/sterna" synthesize --shape 2b-4t "$model"
    files_key="$(cat "$model"/{config,tokenizer,tokenizer_config}.json "$here/write_gguf.py" |
        sha256sum)"
    run remember "files-$shape" "$files_key" write_files "$model"
    ;;
bonsai-2-2b)
    model="$files/q2_0.gguf"
    files_key="$("$bin/sterna" --version), $(sha256sum <"$here/write_gguf.py")"
    run remember "files-$shape" "$files_key" write_equal_files
    ;;
*)
    model="$files/${all_types[0]}.gguf"
    run remember "files-$shape" "$("$bin/sterna" --version)" write_shared_file
    ;;
esac
gcc -O3 -march=native -pthread -o "$work/bandwidth" "$here/bandwidth.c"

ggufs=("${types[@]/#/$files/}")
step "measuring"
run python3 "$here/compare.py" --sterna "$bin/sterna" --loadtest "$bin/sterna-loadtest" \
    --model "$model" --llama-server "$build/bin/llama-server" \
    --llama-version "llama.cpp of llama-cpp-python $peer, gcc $compiler, GGML_NATIVE" \
    --gguf "${ggufs[@]/%/.gguf}" \
    --clients "${clients[@]}" --bandwidth "$work/bandwidth" \
    --threads "$threads" --repetitions "$repetitions" --logs "$work" \
    ${json:+--json "$json"} ${quick:+--quick} ${alone:+--alone}
