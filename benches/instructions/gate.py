#!/usr/bin/env python3
"""Counts the instructions of small cases under valgrind, and compares them with those on record.

    benches/instructions/gate.py            fails where a case takes over 3 % more instructions than recorded
    benches/instructions/gate.py --record   writes what is counted now to benches/record/instructions.txt

A count is that of one round: (a run of 2n rounds - a run of n rounds) / n. Unlike a time it is the same on a busy machine and on a quiet
one; unlike a test it sees a kernel that is right and slow. It says nothing of memory, nor of AVX-512, which valgrind does not know.
"""

import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECORD = ROOT / "benches" / "record" / "instructions.txt"
TOLERANCE = 0.03
RECORD_COMMAND = "benches/instructions/gate.py --record"


def main():
    if sys.argv[1:] not in ([], ["--record"]):
        sys.exit(__doc__)
    if platform.machine() != "x86_64":
        sys.exit(f"instructions: the counts are of x86_64, this is {platform.machine()}")
    if shutil.which("valgrind") is None:
        sys.exit("instructions: valgrind is missing; install the package `valgrind`")
    binary = build()
    compiler = output(["rustc", "--version"]).strip()
    counts = count_all(binary)
    if sys.argv[1:] == ["--record"]:
        write(compiler, counts)
        print(f"recorded {len(counts)} counts in {RECORD.relative_to(ROOT)}")
    else:
        sys.exit(compare(compiler, counts))


def build():
    """The program with the cases, compiled as the server is."""
    command = ["cargo", "build", "--release", "--locked", "--quiet", "--package", "sterna-instructions"]
    if subprocess.run(command, cwd=ROOT).returncode != 0:
        sys.exit("instructions: the cases do not compile")
    target = os.environ.get("CARGO_TARGET_DIR", "target")
    return ROOT / target / "release" / "sterna-instructions"


def output(command):
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def count_all(binary):
    """Instructions of a round of every case, in the program's order."""
    cases = [line.split() for line in output([binary]).splitlines()]
    # Runs wait for nothing, and their counts do not depend on what runs beside them.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        once = [pool.submit(count, binary, name, 1) for name, _ in cases]
        twice = [pool.submit(count, binary, name, 2) for name, _ in cases]
        return {
            name: round((more.result() - less.result()) / int(rounds))
            for (name, rounds), less, more in zip(cases, once, twice)
        }


def count(binary, name, times):
    """All instructions of one run."""
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", binary, name, str(times)]
    # Without variables: the start of a process reads them.
    run = subprocess.run(command, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    collected = re.search(r"Collected : (\d+)", run.stderr)
    if run.returncode != 0 or collected is None:
        sys.exit(f"instructions: {name} could not be counted:\n{run.stderr}")
    return int(collected[1])


def write(compiler, counts):
    lines = [
        "# Instructions of one round of each case, as valgrind counts them. Written by:",
        f"# {RECORD_COMMAND}",
        f"compiler {compiler}",
    ]
    lines += [f"{name} {value}" for name, value in counts.items()]
    RECORD.write_text("\n".join(lines) + "\n")


def read():
    """The compiler and the counts on record."""
    if not RECORD.exists():
        sys.exit(f"instructions: there is no {RECORD.relative_to(ROOT)}; write it: {RECORD_COMMAND}")
    lines = [line for line in RECORD.read_text().splitlines() if line and not line.startswith("#")]
    pairs = dict(line.split(" ", 1) for line in lines)
    compiler = pairs.pop("compiler")
    return compiler, {name: int(value) for name, value in pairs.items()}


def compare(compiler, counts):
    """Prints every case beside its record; 1 if one is worse or the cases are not those on record."""
    recorded_by, recorded = read()
    slower, fewer, unrecorded = [], [], []
    for name, now in counts.items():
        before = recorded.get(name)
        if before is None:
            unrecorded.append(name)
            print(f"  {name:<40} {'':>12} {now:>12}  not on record")
            continue
        change = now / before - 1
        if change > TOLERANCE:
            slower.append(name)
        elif change < -TOLERANCE:
            fewer.append(name)
        mark = "  <-- too many" if change > TOLERANCE else ""
        print(f"  {name:<40} {before:>12} {now:>12} {100 * change:>+8.2f} %{mark}")
    vanished = [name for name in recorded if name not in counts]
    if compiler != recorded_by:
        print(f"instructions: recorded with {recorded_by}, counted with {compiler}.")
    if fewer:
        print(f"instructions: fewer than recorded, so record them: {RECORD_COMMAND}: {', '.join(fewer)}")
    if slower:
        print(
            f"instructions: FAILED, over {TOLERANCE:.0%} more than recorded: {', '.join(slower)}.\n"
            f"If the change is worth it (or the compiler alone differs), record it and say why in the commit: {RECORD_COMMAND}"
        )
    if unrecorded or vanished:
        print(f"instructions: FAILED, cases and record differ: {', '.join(unrecorded + vanished)}. Record them: {RECORD_COMMAND}")
    return 1 if slower or unrecorded or vanished else 0


if __name__ == "__main__":
    main()
