"""Checks deploy/ray_serve.py with two servers of the demo model on one machine: answers and streams
come through Ray's proxy, and after a server is killed, Ray replaces the server. Prints one line per
check.

The script starts Ray on the loopback address, with a free port for the proxy, and stops it.
"""

import argparse
import collections
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import ray
from ray import serve

flags = argparse.ArgumentParser(description=__doc__)
flags.add_argument("--bin", required=True, help="folder of the server's program")
flags.add_argument("--deploy", required=True, help="folder of ray_serve.py")
args = flags.parse_args()

PROGRAM = str(Path(args.bin, "sterna").resolve())
REPLICAS = 2
PATIENCE = 240  # Seconds that only a hanging program takes.
# Ray asks each server for its health every 5 s, and replaces a server after three failures.
REPLACED_WITHIN = 120
BODY = {
    "model": "default",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 16,
    "temperature": 0,
}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def servers():
    """Returns the process ids of the servers of this check."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            # A server's workers for grammars have other arguments.
            if command[:2] == [PROGRAM.encode(), b"--port"]:
                found.append(int(folder.name))
        except OSError:
            continue  # The process has ended.
    return sorted(found)


def await_that(condition, what, seconds=PATIENCE):
    """Waits until `condition()` is true, and returns its value."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.2)
    raise AssertionError(f"{what}: not within {seconds} s")


def ask(client):
    """Sends one request. Returns its status, or 0 if the connection failed."""
    try:
        answer = client.post("/v1/chat/completions", json=BODY)
    except httpx.TransportError:
        return 0, ""
    if answer.status_code != 200:
        return answer.status_code, answer.text
    return 200, answer.json()["choices"][0]["message"]["content"]


def a_stream(client):
    """Returns the text of a streamed answer."""
    text, done = "", False
    with client.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
    assert done, "the stream has no end"
    return text


def answers_come_through(client):
    status, text = ask(client)
    assert status == 200 and "Paris" in text, (status, text)
    assert a_stream(client) == text
    wrong = client.post("/v1/chat/completions", json={**BODY, "temperature": 9})
    assert wrong.status_code == 400 and "'temperature'" in wrong.text, wrong.text
    print(f"ok  {REPLICAS} servers behind Ray {ray.__version__}: answer, stream and error pass")


def a_killed_server_is_replaced(client, expected):
    """Kills a server and goes on asking, until two servers have served 50 answers in a row."""
    first = servers()
    os.kill(first[0], signal.SIGKILL)
    killed, last_error = time.monotonic(), None
    statuses, in_a_row = collections.Counter(), 0
    while in_a_row < 50 or len(set(servers()) - {first[0]}) < REPLICAS:
        assert time.monotonic() < killed + REPLACED_WITHIN, (statuses, servers(), first)
        began = time.monotonic()
        status, text = ask(client)
        statuses[status] += 1
        if status == 200:
            assert text == expected, text
            in_a_row += 1
        else:
            # The replica says that its server is gone, or Ray's proxy that the replica is.
            assert status in (0, 500, 502, 503), (status, text)
            assert time.monotonic() - began < 30, "a request hangs"
            in_a_row, last_error = 0, time.monotonic() - killed
    assert statuses[200] > 50 or not last_error, statuses
    errors = sum(statuses.values()) - statuses[200]
    until = f", the last one after {last_error:.0f} s" if errors else ""
    print(f"ok  a killed server: {statuses[200]} answers, {errors} errors{until}; replaced")


def main():
    assert not servers(), f"{PROGRAM} runs already"
    port = free_port()
    # The dashboard would take a fixed port.
    address = ray.init(include_dashboard=False, log_to_driver=False).address_info["address"]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    words = [f"program={PROGRAM}", f"replicas={REPLICAS}", f"replicas_per_node={REPLICAS}"]
    words += ["flags=--threads 1 --kv-memory 128MiB"]
    command = [Path(sys.executable).with_name("serve"), "run", "--address", address]
    command += ["--working-dir", ".", "ray_serve:build", *words]
    with tempfile.NamedTemporaryFile("w+") as log:
        run = subprocess.Popen(command, stdout=log, stderr=log, cwd=args.deploy)
        try:
            timeout = httpx.Timeout(60)
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=timeout) as client:
                await_that(
                    lambda: run.poll() is not None
                    or (len(servers()) == REPLICAS and ask(client)[0] == 200),
                    "the servers are ready",
                )
                assert run.poll() is None, f"serve run exited with {run.returncode}"
                answers_come_through(client)
                a_killed_server_is_replaced(client, ask(client)[1])
        except BaseException:
            log.seek(0)
            print(log.read()[-6000:], file=sys.stderr)
            raise
        finally:
            run.send_signal(signal.SIGINT)  # As Ctrl-C does: Ray ends the deployment.
            try:
                run.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                run.kill()
            serve.shutdown()
            ray.shutdown()
    await_that(lambda: not servers(), "the servers have ended", 90)
    print("ok  all servers have ended")


main()
