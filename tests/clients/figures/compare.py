"""Compares the figures of AIPerf with the figures of sterna-loadtest.

Both measure the same server with the same load, in turns: the same number of clients, lengths of
prompts and answers. The texts differ, and the tools start requests at different moments. So each
latency is also divided by the server's own mean of the same run. The medians over the rounds must
agree within 15 %: throughput, and the latencies over the server's.

The server computes on one thread, and on a core of its own if the machine has two. It does not
speculate, because drafts depend on the text.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

CLIENTS, REQUESTS = 4, 200
PROMPT, ANSWER = 600, 16  # Tokens; the prompt without the chat template.
ROUNDS = 3
TOLERANCE = 0.15
PATIENCE = 60  # Seconds that only a hanging program takes.
FIGURES = ["requests/s", "output tokens/s"]
FIGURES += ["first token, ms", "server's", "per token, ms", "server's"]
COMPARED = ["requests/s", "output tokens/s", "first token/server's", "per token/server's"]
HISTOGRAMS = [
    "vllm:time_to_first_token_seconds",
    "vllm:request_time_per_output_token_seconds",
]

flags = argparse.ArgumentParser(description=__doc__)
flags.add_argument("--bin", required=True, help="folder of the programs")
flags.add_argument("--tokenizer", required=True, help="folder of the demo's tokenizer")
args = flags.parse_args()
tokenizer = Path(args.tokenizer).resolve()
cores = sorted(os.sched_getaffinity(0))


def on_core(number):
    """Returns what runs a command on one core, if there are two."""
    return ["taskset", "-c", str(cores[number])] if len(cores) > 1 else []


def start(folder):
    """Starts the server. Returns its process and its address."""
    log = Path(folder, "server.log")
    command = [Path(args.bin, "sterna").resolve(), "--port", "0", "--threads", "1"]
    command += ["--speculate", "0"]
    with open(log, "w") as output:
        process = subprocess.Popen([*on_core(0), *command], stdout=output, stderr=output)
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and process.poll() is None:
        _, told, rest = log.read_text().partition("on http://127.0.0.1:")
        if told and " " in rest:
            url = f"http://127.0.0.1:{rest.split()[0]}"
            try:
                urllib.request.urlopen(url + "/ready", timeout=5)
                return process, url
            except OSError:
                pass
        time.sleep(0.1)
    process.kill()
    raise AssertionError(f"the server is not ready: {log.read_text()[-4000:]}")


def run(command, folder):
    done = subprocess.run([*on_core(-1), *command], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout[-4000:], done.stderr[-4000:])
    return done.stdout


def aiperf(url, folder, seed):
    """Measures with AIPerf. Returns the figures, and the mean length of a prompt in tokens."""
    artifacts = Path(folder, "aiperf")
    shutil.rmtree(artifacts, ignore_errors=True)
    program = Path(sys.executable).with_name("aiperf")
    command = [program, "profile", "--model", "sterna-demo", "--url", url, "--streaming"]
    command += ["--endpoint-type", "chat", "--tokenizer", tokenizer, "--use-server-token-count"]
    command += ["--concurrency", CLIENTS, "--request-count", REQUESTS, "--isl", PROMPT]
    command += ["--conversation-num", REQUESTS]  # Otherwise, some prompts would be sent twice.
    command += ["--osl", ANSWER, "--extra-inputs", "ignore_eos:true", "--random-seed", seed]
    command += ["--ui-type", "none", "--artifact-dir", artifacts]
    run([str(word) for word in command], folder)
    told = json.loads(Path(artifacts, "profile_export_aiperf.json").read_text())
    assert told["request_count"]["avg"] == REQUESTS, told["request_count"]
    assert told["total_output_tokens"]["avg"] == REQUESTS * ANSWER, told["total_output_tokens"]
    figures = [
        told["request_throughput"]["avg"],
        told["output_token_throughput"]["avg"],
        told["time_to_first_token"]["avg"],
        told["inter_token_latency"]["avg"],
    ]
    return figures, told["usage_prompt_tokens"]["avg"]


def loadtest(url, folder, seed, prompt):
    """Measures with the load test. Returns the figures."""
    command = [Path(args.bin, "sterna-loadtest").resolve(), "drive", "--url", url]
    command += ["--clients", CLIENTS, "--requests", REQUESTS, "--prompt-tokens", round(prompt)]
    command += ["--prompt-spread", 0, "--max-tokens", ANSWER, "--ignore-eos", "--seed", seed]
    told = json.loads(run([str(word) for word in [*command, "--json"]], folder))
    assert told["complete"] == REQUESTS, told["failures"]
    assert told["output_tokens"] == REQUESTS * ANSWER, told["output_tokens"]
    return [
        told["requests_per_second"],
        told["output_tokens_per_second"],
        1000 * told["time_to_first_token_seconds"]["mean"],
        1000 * told["time_per_output_token_seconds"]["mean"],
    ]


def totals(url):
    """Returns the sum in seconds and the count of each histogram of the server."""
    series = {}
    for line in urllib.request.urlopen(url + "/metrics", timeout=60).read().decode().splitlines():
        name, _, value = line.rpartition(" ")
        name = name.split("{")[0]
        if name.endswith(("_sum", "_count")):
            series[name] = series.get(name, 0) + float(value)
    return [(series.get(f"{name}_sum", 0), series.get(f"{name}_count", 0)) for name in HISTOGRAMS]


def beside_server(url, measure):
    """Runs `measure`, which returns figures first. Returns them with the server's own means behind
    each latency, and what else `measure` returns."""
    before = totals(url)
    (requests, tokens, *latencies), *rest = measure()
    row = [requests, tokens]
    for latency, (sum_0, count_0), (sum_1, count_1) in zip(latencies, before, totals(url)):
        row += [latency, 1000 * (sum_1 - sum_0) / (count_1 - count_0)]
    return row, *rest


def show(title, figures):
    print(f"{title:25}" + "".join(f"{figure:16.2f}" for figure in figures), flush=True)


def compared(row):
    """Returns the figures that must agree."""
    requests, tokens, first_token, first_token_of_server, per_token, per_token_of_server = row
    return [requests, tokens, first_token / first_token_of_server, per_token / per_token_of_server]


signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that the server ends too.
with tempfile.TemporaryDirectory() as folder:
    server, url = start(folder)
    try:
        print(" " * 25 + "".join(f"{figure:>16}" for figure in FIGURES))
        of_aiperf, of_loadtest = [], []
        for seed in range(1, ROUNDS + 1):
            row, prompt = beside_server(url, lambda: aiperf(url, folder, seed))
            of_aiperf.append(compared(row))
            show(f"AIPerf, round {seed}", row)
            (row,) = beside_server(url, lambda: [loadtest(url, folder, seed, prompt)])
            of_loadtest.append(compared(row))
            show(f"sterna-loadtest, round {seed}", row)
    finally:
        server.terminate()
        server.wait(PATIENCE)
medians = [[statistics.median(row) for row in zip(*rows)] for rows in (of_aiperf, of_loadtest)]
differing = []
for name, theirs, ours in zip(COMPARED, *medians):
    print(f"{name:40} AIPerf {theirs:9.3f}  sterna-loadtest {ours:9.3f}  {ours / theirs:.3f} times")
    if abs(ours / theirs - 1) > TOLERANCE:
        differing.append(name)
assert not differing, f"these differ by more than {100 * TOLERANCE:g} %: {', '.join(differing)}"
print(f"ok  AIPerf and sterna-loadtest agree within {100 * TOLERANCE:g} %")
