"""Compares two servers of the demo model behind vllm-router with their simulation.

`drive` sends a trace to the router, in which prompts of a family have the same beginning. Then
`simulate` runs the same trace on two machines that take as long as the servers' steps did. The
share of prompt tokens from the caches and the median time to the first token must agree within
15 %. Both times are a server's: they begin when the request arrives at the server. The simulation
has no network, client or router, whose time is printed but not compared.

The script starts and stops the servers and the router, all on free ports of the loopback address.
"""

import argparse
import json
import random
import re
import statistics
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

from servers import Servers

# vllm-router's policy, and the simulator's router.
POLICIES = {"cache_aware": "cache-aware", "round_robin": "round-robin"}
FAMILIES, REQUESTS = 12, 150
SHARED, OWN, ANSWER = 512, 200, 8  # Tokens. The format has blocks of 512 tokens.
SLOW_REQUESTS = 36
BUSY = 0.2  # The part of the time in which a server is to compute.
TOLERANCE = 0.15
PATIENCE = 60  # Seconds that only a hanging server takes.
TRIES = 3  # Other work on this machine can make the servers slower for a part of a run.

flags = argparse.ArgumentParser(description=__doc__)
flags.add_argument("--bin", required=True, help="folder of the programs")
args = flags.parse_args()
loadtest = Path(args.bin, "sterna-loadtest").resolve()


def trace(requests, rate, first_block, seed):
    """Returns a trace in Mooncake's format, with `rate` requests a second. Its blocks of text have
    numbers from `first_block` on."""
    draw = random.Random(seed)
    at, lines = 0.0, []
    for number in range(requests):
        at += draw.expovariate(rate)
        family = draw.randrange(FAMILIES)
        line = {
            "timestamp": round(1000 * at),
            "input_length": SHARED + draw.randint(OWN - 100, OWN + 100),
            "output_length": ANSWER,
            "hash_ids": [first_block + family, first_block + FAMILIES + number],
        }
        lines.append(json.dumps(line))
    return "\n".join(lines) + "\n"


def metrics(url):
    """Returns the series of a server's metrics: {name: {labels: value}}."""
    text = urllib.request.urlopen(url + "/metrics", timeout=60).read().decode()
    found = {}
    for line in text.splitlines():
        series = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
        if series:
            name, labels, value = series.groups()
            found.setdefault(name, {})[labels or ""] = float(value)
    return found


def calibrated(found):
    """Returns the step costs that a server measured at its start, in nanoseconds."""
    parts = {}
    for labels, seconds in found["sterna_step_cost_seconds"].items():
        parts[re.search(r'part="(\w+)"', labels)[1]] = 1e9 * seconds
    costs = {"rows": [parts[f"rows_{2**knot}"] for knot in range(10)]}
    for name in ("kilo_decode_keys", "kilo_chunk_keys", "head", "logit"):
        costs[name] = parts[name]
    return costs


def mean(costs):
    """Returns the mean of each figure."""
    if isinstance(costs[0], dict):
        return {name: mean([cost[name] for cost in costs]) for name in costs[0]}
    if isinstance(costs[0], list):
        return [mean(list(figures)) for figures in zip(*costs)]
    return sum(costs) / len(costs)


def scaled(cost, factor):
    """Returns all figures times `factor`, as whole nanoseconds."""
    if isinstance(cost, dict):
        return {name: scaled(figure, factor) for name, figure in cost.items()}
    if isinstance(cost, list):
        return [scaled(figure, factor) for figure in cost]
    return round(cost * factor)


def slowdown(before, after):
    """Returns how much longer than at the start a server's steps took in between."""

    def spent(name):
        return sum(after[name].values()) - sum(before[name].values())

    return spent("sterna_step_seconds_sum") / spent("sterna_step_calibrated_seconds_sum")


def report(command):
    """Runs a command of the load test. Returns its JSON report."""
    done = subprocess.run([loadtest, *command, "--json"], capture_output=True, text=True)
    assert done.returncode == 0, (command, done.stdout[-4000:], done.stderr[-4000:])
    return json.loads(done.stdout)


def first_tokens(servers):
    """Returns the servers' times to the first token so far, of requests of traces."""
    found = []
    for program in servers.programs[: len(servers.urls)]:
        *lines, _ = program.log.read_text().split("\n")  # The last one has no end yet.
        for line in lines:
            if '"sterna::requests"' in line:
                fields = json.loads(line)["fields"]
                # The load test's first requests, which measure its words, are shorter.
                if (fields.get("prompt_tokens") or 0) > SHARED:
                    found.append((fields["id"], fields["first_token_seconds"]))
    return dict(found)


def drive(servers, folder, lines):
    """Sends a trace. Returns the report, the mean costs of the servers' steps meanwhile, and the
    servers' median time to the first token in seconds."""
    folder.joinpath("trace.jsonl").write_text(lines)
    folder.joinpath("keys.txt").write_text(f"acme={servers.keys['acme']}\n")
    earlier = first_tokens(servers)
    before = [metrics(url) for url in servers.urls]
    told = report(
        ["drive", "--url", servers.url, "--trace", folder / "trace.jsonl", "--ignore-eos"]
        + ["--keys", folder / "keys.txt", "--requests", str(REQUESTS)]
    )
    after = [metrics(url) for url in servers.urls]
    factor = mean([slowdown(*pair) for pair in zip(before, after)])
    costs = scaled(mean([calibrated(found) for found in before]), factor)
    end, new = time.monotonic() + PATIENCE, {}
    while len(new) < told["complete"]:  # The server's log is written a moment later.
        assert time.monotonic() < end, f"{len(new)} of {told['complete']} requests are in the log"
        time.sleep(0.1)
        now = first_tokens(servers)
        new = {name: now[name] for name in now.keys() - earlier.keys()}
    return told, costs, statistics.median(new.values())


def simulated(folder, costs, router):
    """Simulates the trace that was sent last. Returns the share of cached prompt tokens, and the
    median time to the first token in seconds."""
    folder.joinpath("costs.json").write_text(json.dumps(costs))
    told = report(
        ["simulate", "--trace", folder / "trace.jsonl", "--cost", folder / "costs.json"]
        + ["--machines", "2", "--router", router, "--requests", str(REQUESTS)]
    )
    return told["prefix"]["hits"], told["classes"]["trace"]["first_token_seconds"]["p50"]


def request_rate(costs):
    """Returns how many requests a second keep two servers as busy as wanted."""
    token = (costs["rows"][9] - costs["rows"][8]) / 256
    cold = 2 * FAMILIES / REQUESTS  # The share of requests that may not find their block.
    nanoseconds = token * (OWN + cold * SHARED)
    nanoseconds += ANSWER * (costs["rows"][0] + costs["head"] + costs["logit"])
    return 2 * BUSY * 1e9 / nanoseconds


def agree(policy, seed):
    """Returns whether a live run agrees with its simulation. Prints the figures.

    A slow trace comes first. It tells the speed of the servers, and how much time a request spends
    in a server but outside of steps, such as in the tokenizer. The simulation does not have it.
    """
    servers = Servers(args.bin, 2, "vllm-router", policy)
    router = POLICIES[policy]
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            slow = trace(SLOW_REQUESTS, 3, 10_000, seed)
            _, costs, first_token = drive(servers, folder, slow)
            _, in_steps = simulated(folder, costs, router)
            outside = first_token - in_steps
            lines = trace(REQUESTS, request_rate(costs), 0, seed)
            told, costs, first_token = drive(servers, folder, lines)
            expected_hits, expected = simulated(folder, costs, router)
    finally:
        servers.stop()
    hits = told["cached_tokens"] / told["prompt_tokens"]
    away = told["time_to_first_token_seconds"]["p50"] - first_token
    expected += outside
    print(
        f"    {policy}: {hits:.3f} of the prompt tokens cached, simulated {expected_hits:.3f}; "
        f"first token {1000 * first_token:.1f} ms, simulated {1000 * expected:.1f} ms, of which "
        f"{1000 * outside:.1f} ms outside of steps; and in client and router {1000 * away:.1f} ms",
        flush=True,
    )
    figures = [(expected_hits, hits), (expected, first_token)]
    return all(abs(told / measured - 1) <= TOLERANCE for told, measured in figures)


for policy in POLICIES:
    assert any(agree(policy, seed) for seed in range(TRIES)), f"{policy}: no run agrees"
    print(f"ok  vllm-router {policy}: the servers and their simulation agree within 15 %")
