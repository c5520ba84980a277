"""Servers of the demo model with the same tenants, and a router before them, for the checks of this
folder. All ports are free ones of the loopback address.
"""

import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from openai import OpenAI

MODEL = "sterna-demo"
PATIENCE = 60  # Seconds that only a hanging request or program takes.


def free_ports(count):
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


class Program:
    """A process with a log. `stop` ends it."""

    def __init__(self, folder, name, command):
        self.log = Path(folder, f"{name}.log")
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)

    def await_answer(self, url, headers={}):
        """Waits until `url` answers with 200."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and self.process.poll() is None:
            try:
                urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=5)
                return
            except OSError:
                time.sleep(0.1)
        raise AssertionError(f"{url} does not answer: {self.log.read_text()[:6000]}")

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill()


class Servers:
    """Servers with the same tenants, and perhaps a router before them. `programs` is the folder of
    the server's program."""

    def __init__(self, programs, count, router=None, policy=None):
        self.program = Path(programs, "sterna").resolve()
        self.folder = tempfile.TemporaryDirectory()
        self.keys = {}
        limits = {"acme": "", "small": "requests_per_minute = 1\n", "router": ""}
        tables = [self.tenant(name, limit) for name, limit in limits.items()]
        tenants = Path(self.folder.name, "tenants.toml")
        tenants.write_text("".join(tables))
        ports = free_ports(2 * count + 2)
        self.events = [f"127.0.0.1:{port}" for port in ports[count + 2 :]]
        self.urls = [f"http://127.0.0.1:{port}" for port in ports[:count]]
        self.programs = []
        try:
            for port, events in zip(ports, self.events):
                command = [self.program, "--port", str(port)]
                more = ["--tenants", tenants, "--metrics-open", "--threads", "1"]
                more += ["--kv-memory", "256MiB", "--log-json"]
                more += ["--kv-events", events, "--kv-events-of", "all"]
                more += ["--kv-events-topic", "", "--kv-events-format", "maps"]
                self.programs.append(
                    Program(self.folder.name, f"server-{port}", [*command, *more])
                )
            for program, url in zip(self.programs, self.urls):
                program.await_answer(url + "/ready")
            self.router, self.url = None, self.urls[0]
            if router:
                self.url = f"http://127.0.0.1:{ports[count]}"
                self.router = self.start_router(router, policy, ports[count], ports[count + 1])
        except BaseException:
            self.stop()
            raise

    def tenant(self, name, limits):
        keygen = [self.program, "keygen", name]
        made = subprocess.run(keygen, capture_output=True, text=True, check=True)
        self.keys[name] = made.stderr.split()[-1]
        return made.stdout + limits

    def start_router(self, router, policy, port, metrics_port):
        """Starts the router, as the README describes it."""
        program = Path(sys.executable).with_name(router)
        launch = ["launch"] if router == "smg" else ["--worker-urls", *self.urls]
        command = [program, *launch, "--policy", policy, "--host", "127.0.0.1"]
        command += ["--port", str(port)]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
        command += ["--health-check-endpoint", "/ready", "--health-check-interval-secs", "1"]
        if policy == "kv_aware":
            command += ["--kv-event-model", MODEL, "--kv-event-block-size", "16"]
            for url, events in zip(self.urls, self.events):
                command += ["--kv-event-source", f"{url}=tcp://{events}"]
        program = Program(self.folder.name, router, command)
        self.programs.append(program)
        if router == "smg":
            self.add_workers(program)
        bearer = {"authorization": f"Bearer {self.keys['acme']}"}
        program.await_answer(self.url + "/v1/models", bearer)
        return program

    def add_workers(self, program):
        """Adds the servers to SMG, which asks each for its models with the router's own key."""
        program.await_answer(self.url + "/health")
        for url in self.urls:
            worker = json.dumps({"url": url, "api_key": self.keys["router"]})
            headers = {"content-type": "application/json"}
            request = urllib.request.Request(self.url + "/workers", worker.encode(), headers)
            urllib.request.urlopen(request, timeout=PATIENCE)
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            workers = json.load(urllib.request.urlopen(self.url + "/workers", timeout=PATIENCE))
            healthy = [worker for worker in workers["workers"] if worker["is_healthy"]]
            if len(healthy) == len(self.urls):
                return
            time.sleep(0.1)
        raise AssertionError(f"SMG has no healthy workers: {workers}")

    def client(self, key="acme"):
        key = self.keys.get(key, key)
        return OpenAI(base_url=self.url + "/v1", api_key=key, max_retries=0, timeout=PATIENCE)

    def stop(self):
        for program in reversed(self.programs):
            program.stop()
        self.folder.cleanup()
