#!/usr/bin/env python3
"""Checks a server beside other work, and chats beside long prompts.

    cargo build --release --workspace
    benches/disturbed.py --model /tmp/2b              # all scenes, about ten minutes
    benches/disturbed.py --model /tmp/2b --scene start

The scenes, each at most five minutes:

- start: three busy loops for each core run while the server starts, and then end. It gives at least
  0.9 of the tokens per second of a server that started in peace, and the median time to first token
  is at most 1.2 times as long.
- load: the loops run all the time. The server gives at least 0.75 of the tokens per second that it
  gives with --itl-target-ms 60000.
- long-prompts: one client sends prompts of 4,000 tokens all the time, beside eight chats. Of the
  times between two tokens of a chat, 99 in 100 are at most 1.25 times the target.
- idle: as start, and then no request comes for a while, so the server measures the cost of a step
  again. A request that comes meanwhile gets its first token at most 0.25 s later than others, and
  the same text.

Exits with 1 if a bar is missed. Let nothing else run meanwhile.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.request

RELEASE = pathlib.Path(__file__).resolve().parents[1] / "target" / "release"
LOOPS_PER_CORE = 3
INTER_TOKEN_TARGET = 0.2  # Seconds; the server's default.
PAUSE = 2  # Seconds for which a server is idle before it measures again.


def main():
    scenes = {"start": start, "load": load, "long-prompts": long_prompts, "idle": idle}
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="directory of a checkpoint")
    parser.add_argument("--scene", choices=scenes, action="append", help="run only this scene")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # So that the server is stopped.
    bars = [bar for name in args.scene or scenes for bar in scenes[name](args.model)]
    missed = False
    for name, found, least, most in bars:
        holds = least <= found <= most
        missed |= not holds
        limit = f"at least {least}" if most == float("inf") else f"at most {most}"
        print(f"{name:<52}{found:>7.2f}  {limit}{'' if holds else '  MISSED'}")
    sys.exit(1 if missed else 0)


def at_least(name, found, bar):
    return name, found, bar, float("inf")


def at_most(name, found, bar):
    return name, found, 0, bar


def start(model):
    """Compares a server that started under load with one that started in peace."""
    with serving(model) as (url, _):
        peace = chats("started in peace", url, 44)
    with serving(model, disturbed=True) as (url, loops):
        stop(loops)
        after = chats("started under load", url, 44)
    return [
        at_least("started under load: tokens/s of peace", speed(after) / speed(peace), 0.9),
        at_most("started under load: TTFT of peace", first(after) / first(peace), 1.2),
    ]


def load(model):
    """Compares a server under load with one that has no inter-token target."""
    with serving(model, disturbed=True) as (url, _):
        with_target = chats("under load", url, 16)
    with serving(model, ["--itl-target-ms", "60000"], disturbed=True) as (url, _):
        without = chats("under load, without a target", url, 16)
    share = speed(with_target) / speed(without)
    return [at_least("under load: tokens/s without a target", share, 0.75)]


def chats(name, url, requests):
    """Runs 16 clients with prompts of 107 tokens and answers of 64."""
    report = drive(url, 16, requests, 107, 64, "--prompt-spread", "0")
    print(f"{name:<44}{speed(report):>7.1f} tokens/s, first token {first(report):.1f} s (median)",
          flush=True)
    return report


def long_prompts(model):
    """Measures the time between two tokens of chats beside long prompts."""
    with serving(model) as (url, _):
        command = drive_command(url, 1, 1000, 4000, 32, "--prompt-spread", "0", "--seed", "5")
        long = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            report = drive(url, 8, 100, 50, 64)
        finally:
            stop([long])
    found = report["inter_token_seconds"]
    figures = ", ".join(f"{name} {found[name]:.3f}" for name in ("p50", "p90", "p99", "max"))
    print(f"{'chats beside long prompts':<44}between tokens: {figures} s", flush=True)
    share = found["p99"] / INTER_TOKEN_TARGET
    return [at_most("beside long prompts: p99 between tokens of the target", share, 1.25)]


def idle(model):
    """Lets a server measure again, with a request in the midst of the first attempt."""
    with serving(model, disturbed=True) as (url, loops):
        before = cost_of_step(url)
        stop(loops)
        time.sleep(PAUSE + 1)
        delay, text = answer(url)
        assert cost_of_step(url) == before, "the request did not come during the measurement"
        deadline = time.monotonic() + 60
        while (after := cost_of_step(url)) == before:
            if time.monotonic() > deadline:
                sys.exit("disturbed: the server did not measure again in an idle minute")
            time.sleep(1)
        later = [answer(url) for _ in range(5)]
    print(f"{'cost of a step of one token':<44}{1e3 * before:.1f} ms, then {1e3 * after:.1f} ms",
          flush=True)
    usual = statistics.median(delay for delay, _ in later)
    print(f"{'first token':<44}{delay:.3f} s during the measurement, later {usual:.3f} s",
          flush=True)
    different = sum(other != text for _, other in later)
    return [
        at_most("during a measurement: delay of the first token, s", delay - usual, 0.25),
        at_most("during a measurement: other texts", different, 0),
    ]


def cost_of_step(url):
    """Returns the seconds of a step of one token, as last measured."""
    with urllib.request.urlopen(f"{url}/metrics") as metrics:
        text = metrics.read().decode()
    return float(re.search(r'^sterna_step_cost_seconds\{.*part="rows_1".*\} (\S+)$', text, re.M)[1])


def answer(url):
    """Returns the seconds until the first token of an answer, and its text."""
    body = {"prompt": "The quick brown fox", "max_tokens": 16, "temperature": 0, "stream": True,
            "ignore_eos": True}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(),
                                     {"content-type": "application/json"})
    sent, delay, text = time.monotonic(), None, ""
    with urllib.request.urlopen(request) as events:
        for line in events:
            if not line.startswith(b"data: {"):
                continue
            delay = delay or time.monotonic() - sent
            text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
    return delay, text


@contextlib.contextmanager
def serving(model, flags=(), disturbed=False):
    """Runs a server. If it is disturbed, busy loops run from before its start."""
    loops = start_loops() if disturbed else []
    command = [RELEASE / "sterna", "--model", model, "--port", "0", "--speculate", "0"]
    command += ["--kv-memory", "2GiB", "--max-queued-seconds", "4000", *flags]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield address(server), loops
    finally:
        stop([*loops, server])


def drive_command(url, clients, requests, prompt, answer, *flags):
    command = [RELEASE / "sterna-loadtest", "drive", "--url", url, "--json", "--ignore-eos"]
    command += ["--clients", str(clients), "--requests", str(requests)]
    return [*command, "--prompt-tokens", str(prompt), "--max-tokens", str(answer), *flags]


def drive(*args):
    """Runs the load test and returns its report."""
    run = subprocess.run(drive_command(*args), check=True, stdout=subprocess.PIPE)
    return json.loads(run.stdout)


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
