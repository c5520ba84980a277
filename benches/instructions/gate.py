#!/usr/bin/env python3
"""Counts the instructions of small cases under valgrind and compares them with the record.

    benches/instructions/gate.py            fails if a case takes over 3 % more instructions
    benches/instructions/gate.py --record   writes the counts to benches/record/instructions.txt

The count of a case is that of one round: (run of 2n rounds - run of n rounds) / n. Unlike a time,
it does not depend on the load of the machine. Unlike a test, it shows that a correct kernel has
become slow. It does not show memory effects. It does not cover AVX-512, which valgrind does not
support.
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
        sys.exit(f"instructions: the record is for x86_64; this is {platform.machine()}")
    if shutil.which("valgrind") is None:
        sys.exit("instructions: valgrind is missing; install the package 'valgrind'")
    binary = build()
    compiler = output(["rustc", "--version"]).strip()
    counts = count_all(binary)
    if sys.argv[1:] == ["--record"]:
        write(compiler, counts)
        print(f"recorded {len(counts)} counts in {RECORD.relative_to(ROOT)}")
    else:
        sys.exit(compare(compiler, counts))


def build():
    """Compiles the program with the cases, with the server's profile. Returns its path."""
    command = ["cargo", "build", "--release", "--locked", "--quiet"]
    command += ["--package", "sterna-instructions"]
    if subprocess.run(command, cwd=ROOT).returncode != 0:
        sys.exit("instructions: the package sterna-instructions does not compile; see above")
    target = os.environ.get("CARGO_TARGET_DIR", "target")
    return ROOT / target / "release" / "sterna-instructions"


def output(command):
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def count_all(binary):
    """Returns the instructions of one round of every case, in the program's order."""
    cases = [line.split() for line in output([binary]).splitlines()]
    # The runs are independent, and their counts do not depend on other processes.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        once = [pool.submit(count, binary, name, 1) for name, _ in cases]
        twice = [pool.submit(count, binary, name, 2) for name, _ in cases]
        return {
            name: round((more.result() - less.result()) / int(rounds))
            for (name, rounds), less, more in zip(cases, once, twice)
        }


def count(binary, name, times):
    """Returns the instructions of one run."""
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]
    command += [binary, name, str(times)]
    # Environment variables would change the count, because the start of a process reads them.
    env = {"PATH": os.environ["PATH"]}
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    collected = re.search(r"Collected : (\d+)", run.stderr)
    if run.returncode != 0 or collected is None:
        sys.exit(f"instructions: valgrind could not count {name}:\n{run.stderr}")
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
    """Returns the compiler and the counts of the record."""
    if not RECORD.exists():
        path = RECORD.relative_to(ROOT)
        sys.exit(f"instructions: {path} is missing; write it with {RECORD_COMMAND}")
    lines = [line for line in RECORD.read_text().splitlines() if line and not line.startswith("#")]
    pairs = dict(line.split(" ", 1) for line in lines)
    compiler = pairs.pop("compiler")
    return compiler, {name: int(value) for name, value in pairs.items()}


def compare(compiler, counts):
    """Prints every case beside its record.

    Returns 1 if a case is slower than its record or if the cases differ from the record, else 0.
    """
    recorded_by, recorded = read()
    slower, faster, unrecorded = [], [], []
    for name, now in counts.items():
        before = recorded.get(name)
        if before is None:
            unrecorded.append(name)
            print(f"  {name:<40} {'':>12} {now:>12}  not in the record")
            continue
        change = now / before - 1
        if change > TOLERANCE:
            slower.append(name)
        elif change < -TOLERANCE:
            faster.append(name)
        mark = "  <-- too many" if change > TOLERANCE else ""
        print(f"  {name:<40} {before:>12} {now:>12} {100 * change:>+8.2f} %{mark}")
    missing = [name for name in recorded if name not in counts]
    if compiler != recorded_by:
        print(f"instructions: the record is of {recorded_by}; these counts are of {compiler}.")
    if faster:
        print(
            f"instructions: these cases take fewer instructions than the record: "
            f"{', '.join(faster)}.\nUpdate the record: {RECORD_COMMAND}"
        )
    if slower:
        print(
            f"instructions: FAILED. These cases take over {TOLERANCE:.0%} more instructions than "
            f"the record: {', '.join(slower)}.\nIf the change is worth it, or if only the compiler "
            f"has changed, update the record and give the reason in the commit: {RECORD_COMMAND}"
        )
    if unrecorded or missing:
        print(
            f"instructions: FAILED. These cases are only in the program or only in the record: "
            f"{', '.join(unrecorded + missing)}.\nUpdate the record: {RECORD_COMMAND}"
        )
    return 1 if slower or unrecorded or missing else 0


if __name__ == "__main__":
    main()
