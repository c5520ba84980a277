"""Checks that the load test and the server report the same latencies, in five scenes from 4 clients
without a queue to 2,000 clients with a long one.

For the time to the first token and the end-to-end latency, the clients' mean is compared with the
exact mean of the server's histogram. The clients' median and 99th percentile are compared with the
exact ones of the server's log, and must lie in the buckets where the histogram has them. Each may
differ by 2 %, or by 2 ms if that is more: what two processes and a connection take.

The server computes on one thread, so the clients have another core. A scene that other work on the
machine has disturbed runs again, up to three times in all.
"""

import argparse
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import namedtuple
from pathlib import Path

Scene = namedtuple("Scene", "name clients requests prompt answer")
# The server runs 16 sequences at a time, so the other clients' requests wait.
RUNNING = 16
SCENES = [
    Scene("no queue, few clients", 4, 160, 800, 64),
    Scene("no queue, full batch", 16, 240, 600, 64),
    Scene("short queue", 64, 640, 256, 64),
    Scene("long queue", 256, 1280, 128, 32),
    Scene("2,000 clients", 2000, 4000, 64, 16),
]
LATENCIES = {
    "first token": ("time_to_first_token", "first_token_seconds"),
    "end to end": ("end_to_end", "total_seconds"),
}
TRANSPORT_SECONDS = 0.002
TRIES = 3
PATIENCE = 60  # Seconds that only a hanging program takes.
OPEN_FILES = 6000

flags = argparse.ArgumentParser(description=__doc__)
flags.add_argument("--bin", required=True, help="folder of the programs")
flags.add_argument("--tolerance", type=float, default=0.02, help="largest difference, as a share")
args = flags.parse_args()
os.environ["no_proxy"] = "127.0.0.1"


class Server:
    """A server of the demo model, and its log."""

    def __init__(self, folder):
        log = Path(folder, "server.log")
        command = [Path(args.bin, "sterna").resolve(), "--port", "0", "--log-json"]
        command += ["--threads", "1", "--max-running", str(RUNNING)]
        command += ["--max-queued", "4000", "--max-queued-seconds", "4000"]
        with open(log, "w") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output)
        self.log = open(log)
        self.begun = ""  # A line that has no end yet.
        self.url = None

    def await_ready(self):
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and self.process.poll() is None:
            for line in self.new_lines():
                address = re.search(r"on (http://127\.0\.0\.1:\d+) with", line)
                self.url = address[1] if address else self.url
            try:
                if self.url:
                    urllib.request.urlopen(self.url + "/ready", timeout=5)
                    return
            except OSError:
                pass
            time.sleep(0.1)
        self.log.seek(0)
        raise AssertionError(f"the server is not ready: {self.log.read()[-4000:]}")

    def new_lines(self):
        """Returns the whole lines that the log has got since the last call."""
        *lines, self.begun = (self.begun + self.log.read()).split("\n")
        return lines

    def answers(self, scene):
        """Returns the figures of a scene's requests, as the log has them."""
        count = scene.requests
        end = time.monotonic() + PATIENCE
        found = []
        while True:
            for line in self.new_lines():
                if '"sterna::requests"' in line:
                    fields = json.loads(line)["fields"]
                    # The load test's first requests, which measure its words, have other answers.
                    if fields.get("completion_tokens") == scene.answer:
                        found.append(fields)
            if len(found) == count:
                return found
            assert time.monotonic() < end, f"{len(found)} of {count} requests are in the log"
            time.sleep(0.1)

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


def quantile(values, share):
    """Returns the value of the nearest rank, as the load test does."""
    return sorted(values)[max(math.ceil(share * len(values)), 1) - 1]


def is_near(client, server):
    return abs(client - server) <= max(args.tolerance * server, TRANSPORT_SECONDS)


def is_in(client, bucket):
    """Returns whether the client's figure lies in the bucket, or almost."""
    if bucket["to"] is not None and client > bucket["to"] and not is_near(client, bucket["to"]):
        return False
    return client >= bucket["from"] or is_near(client, bucket["from"])


def drive(server, scene, seed):
    """Runs the load test. Returns its report."""
    command = [Path(args.bin, "sterna-loadtest").resolve(), "drive", "--url", server.url]
    command += ["--clients", str(scene.clients), "--requests", str(scene.requests)]
    command += ["--prompt-tokens", str(scene.prompt), "--max-tokens", str(scene.answer)]
    command += ["--prompt-spread", "0.1"]
    command += ["--ignore-eos", "--seed", str(seed), "--server-histograms", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:])
    return json.loads(done.stdout)


def agrees(server, scene, seed):
    """Returns whether the load test and the server agree. Prints their figures."""
    began = time.monotonic()
    report = drive(server, scene, seed)
    assert report["complete"] == scene.requests, report["failures"]
    answers = server.answers(scene)
    seconds = time.monotonic() - began
    print(f"{scene.name}: {scene.clients} clients, {scene.requests} requests, {seconds:.0f} s")
    all_agree = True
    for title, (name, field) in LATENCIES.items():
        clients, histogram = report[f"{name}_seconds"], report["server"][name]
        assert histogram["count"] == scene.requests, histogram
        logged = [answer[field] for answer in answers]
        figures = {"mean": histogram["mean"]}
        figures |= {"p50": quantile(logged, 0.5), "p99": quantile(logged, 0.99)}
        for figure, of_server in figures.items():
            of_clients = clients[figure]
            agree = is_near(of_clients, of_server)
            bucket = ""
            if figure != "mean":
                ends = histogram[figure]
                agree &= is_in(of_clients, ends)
                to = "more" if ends["to"] is None else f"{1000 * ends['to']:g}"
                bucket = f"  bucket {1000 * ends['from']:g} to {to}"
            all_agree &= agree
            print(
                f"    {title:11} {figure:4}  clients {1000 * of_clients:9.1f} ms"
                f"  server {1000 * of_server:9.1f} ms  {100 * (of_clients / of_server - 1):+6.2f} %"
                f"{bucket}{'' if agree else '  DIFFERS'}"
            )
    sys.stdout.flush()
    return all_agree


signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that the server ends too.
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, hard))
with tempfile.TemporaryDirectory() as folder:
    server = Server(folder)
    try:
        server.await_ready()
        seed = 0
        for scene in SCENES:
            for attempt in range(1, TRIES + 1):
                seed += 1  # Other prompts, which the prefix cache does not have.
                if agrees(server, scene, seed):
                    break
                assert attempt < TRIES, f"{scene.name}: no run agrees"
    finally:
        server.stop()
print(f"ok  clients and server agree within {100 * args.tolerance:g} % in {len(SCENES)} scenes")
