#!/usr/bin/env python3
"""Compares a server beside busy loops with one in peace.

    cargo build --release --workspace
    benches/disturbed.py --model /tmp/2b

Each case starts a server and runs 16 clients with 107 tokens in and 64 out:

- peace: nothing else runs.
- calibrated under load: three busy loops for each core run during the start, and then end.
- under load: the loops run during the start and the load test.
- under load without a target: the same with --itl-target-ms 60000.

The bars: calibrated under load, the server gives at least 0.9 of the tokens per second of peace,
and its median time to first token is at most 1.2 times as long. Under load it gives at least 0.75
of the tokens per second that it gives without a target. Exits with 1 if a bar is missed. Let
nothing else run meanwhile. It takes about six minutes.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys

RELEASE = pathlib.Path(__file__).resolve().parents[1] / "target" / "release"
LOOPS_PER_CORE = 3


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="directory of a checkpoint")
    parser.add_argument("--requests", type=int, default=44, help="requests of each case")
    args = parser.parse_args()

    peace = run_case("peace", args)
    after = run_case("calibrated under load", args, during_start=True)
    loaded = run_case("under load", args, during_start=True, during_run=True)
    free = ["--itl-target-ms", "60000"]
    free = run_case("under load without a target", args, free, during_start=True, during_run=True)

    bars = [
        ("calibrated under load: tokens/s of peace", speed(after) / speed(peace), 0.9, True),
        ("calibrated under load: TTFT of peace", first(after) / first(peace), 1.2, False),
        ("under load: tokens/s without a target", speed(loaded) / speed(free), 0.75, True),
    ]
    missed = False
    for name, found, bar, is_least in bars:
        holds = found >= bar if is_least else found <= bar
        missed |= not holds
        print(f"{name:<44}{found:>7.2f}  {'at least' if is_least else 'at most'} {bar}"
              f"{'' if holds else '  MISSED'}")
    sys.exit(1 if missed else 0)


def run_case(name, args, flags=(), during_start=False, during_run=False):
    """Runs one case and returns the load test's report."""
    loops = start_loops() if during_start else []
    command = [RELEASE / "sterna", "--model", args.model, "--port", "0", "--speculate", "0"]
    command += ["--max-queued-seconds", "4000", *flags]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        url = address(server)
        if not during_run:
            stop(loops)
        load = [RELEASE / "sterna-loadtest", "drive", "--url", url, "--json", "--ignore-eos"]
        load += ["--clients", "16", "--requests", str(args.requests)]
        load += ["--prompt-tokens", "107", "--prompt-spread", "0", "--max-tokens", "64"]
        report = json.loads(subprocess.run(load, check=True, stdout=subprocess.PIPE).stdout)
    finally:
        stop([*loops, server])
    print(f"{name:<44}{speed(report):>7.1f} tokens/s, first token {first(report):.1f} s (median)",
          flush=True)
    return report


def start_loops():
    """Starts the busy loops."""
    count = LOOPS_PER_CORE * len(os.sched_getaffinity(0))
    return [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(count)]


def stop(processes):
    """Ends processes. Those that have ended already stay so."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait()


def address(server):
    """Returns the address that the server prints once it is ready."""
    lines = []
    for line in server.stdout:
        lines.append(line)
        found = re.search(r"Sterna serves .* on (http://\S+)", line)
        if found:
            return found[1]
    sys.exit(f"disturbed: the server did not start:\n{''.join(lines)}")


def speed(report):
    return report["output_tokens_per_second"]


def first(report):
    return report["time_to_first_token_seconds"]["p50"]


if __name__ == "__main__":
    main()
