#!/usr/bin/env python3
"""Checks that every query of the dashboards and rules returns data from a real scrape.

It starts a server with tenants and a Prometheus, and sends requests with the load test: some are
cancelled, and some are rejected by a tenant's limit. Alerts return nothing while all is well, so
the check drops the comparisons from their expressions. With --keep both go on running until
Ctrl-C. With --pictures the load lasts three minutes, and the script draws the dashboards from
Prometheus's answers.
"""

import argparse
import hashlib
import json
import math
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request

from draw import draw

ROOT = pathlib.Path(__file__).resolve().parents[3]
# Each limit that a dashboard draws is one of some tenant.
TENANTS = {
    "paper": "weight = 4\nmax_running = 32\nguaranteed_pages = 20\nmax_pages = 2000",
    "ink": "",
    "limited": "requests_per_minute = 20\ntokens_per_minute = 60000",
}
SECONDS = 60  # until the last query must have data
PICTURE_SECONDS = 180
VARIABLES = {
    "$__rate_interval": "30s",
    "$model_name": ".*",
    "$instance": ".*",
    "$tenant": ".*",
    "$top": "10",
}

started = []


def start(command, log):
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    started.append(process)
    return process


def get(url):
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=10) as answer:
        return answer.read().decode()


def wait_for(what, attempt):
    """Returns the first result of `attempt` that is neither false nor an error."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for process in started:
            if process.poll() not in (None, 0):
                sys.exit(f"{process.args[0]} exited with {process.returncode}")
        try:
            if result := attempt():
                return result
        except OSError:
            pass
        time.sleep(0.2)
    sys.exit(f"{what} was not ready in time")


def start_server(options):
    log = options.work / "server.log"
    tenants = options.work / "tenants.toml"
    text = ""
    for name, limits in TENANTS.items():
        key = f"sk-{name}"
        (options.work / f"{name}.key").write_text(f"{name}={key}\n")
        hash_of_key = hashlib.sha256(key.encode()).hexdigest()
        text += f'[[tenant]]\nid = "{name}"\nkey_sha256 = "{hash_of_key}"\n{limits}\n'
    tenants.write_text(text)
    command = [options.bin / "sterna", "--port", "0", "--tenants", tenants, "--metrics-open"]
    start(command, log.open("w"))

    def url():
        found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
        return found and get(found[0] + "/ready") is not None and found[0]

    return wait_for("the server", url)


def start_prometheus(options, server):
    config = options.work / "prometheus.yml"
    target = server.removeprefix("http://")
    config.write_text(
        "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
        f"rule_files: ['{ROOT}/dashboards/rules.yml']\n"
        "scrape_configs:\n"
        f"  - {{job_name: sterna, static_configs: [{{targets: ['{target}']}}]}}\n"
    )
    subprocess.run(["promtool", "check", "config", config], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = [
        f"--config.file={config}",
        f"--storage.tsdb.path={options.work}/data",
        f"--web.listen-address={address}",
    ]
    start(["prometheus", *flags], (options.work / "prometheus.log").open("w"))
    wait_for("Prometheus", lambda: get(f"http://{address}/-/ready"))
    return f"http://{address}"


def start_load(options, server):
    tests = []
    for name in TENANTS:
        flags = ["--url", server, "--keys", options.work / f"{name}.key", "--ignore-eos"]
        if options.pictures:
            rate = {"paper": "30", "ink": "15", "limited": "2"}[name]
            flags += ["--rate", rate, "--arrivals", "bursts:4", "--seconds", f"{PICTURE_SECONDS}"]
        else:
            flags += ["--clients", "4", "--requests", "120"]
        flags += ["--disconnect-fraction", "0.1"]
        flags += ["--shared-prefix-tokens", "32", "--max-tokens", "32"]
        # The load test of the limited tenant reports rejected requests, so its status is not 0.
        log = (options.work / f"{name}.log").open("w")
        command = [options.bin / "sterna-loadtest", *flags]
        tests.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
    return tests


def queries():
    """Yields the place and the PromQL of each query."""
    for path in sorted((ROOT / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", []):
                promql = target["expr"]
                for name, value in VARIABLES.items():
                    promql = promql.replace(name, value)
                yield f"{path.name}: {panel['title']} {target['refId']}", promql
    rules = (ROOT / "dashboards/rules.yml").read_text()
    for kind, name, promql in re.findall(r"- (record|alert): (.*)\n +expr: (.*)", rules):
        if kind == "alert":
            promql = re.sub(r" [<>] [0-9.]+", "", promql)
            # What has disappeared is here, and has not been here for long.
            promql = re.sub(r"absent\((.*)\)", r"\1", promql)
            promql = promql.replace(" offset 15m", "").replace(") > count", ") / count")
        yield f"rules.yml: {name}", promql


def draw_dashboards(prometheus, load, start):
    for test in load:
        test.wait()
    for name in ("overview", "engine", "tenants"):
        dashboard = json.loads((ROOT / f"dashboards/{name}.json").read_text())
        svg = draw(dashboard, prometheus, VARIABLES, start, time.time())
        (ROOT / f"dashboards/{name}.svg").write_text(svg)


def has_data(prometheus, promql):
    query = urllib.parse.urlencode({"query": promql})
    answer = json.loads(get(f"{prometheus}/api/v1/query?{query}"))
    return any(not math.isnan(float(row["value"][1])) for row in answer["data"]["result"])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bin", type=pathlib.Path, required=True, help="folder of the programs")
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder for files")
    parser.add_argument("--keep", action="store_true", help="keep running until Ctrl-C")
    parser.add_argument("--pictures", action="store_true", help="draw dashboards/*.svg")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    load = []
    try:
        server = start_server(options)
        prometheus = start_prometheus(options, server)
        # Prometheus waits a few seconds before its first scrape, and misses a load before it.
        wait_for("the first scrape", lambda: has_data(prometheus, "up == 1"))
        load_started = time.time()
        load = start_load(options, server)
        every = list(queries())
        assert len(every) > 80, f"only {len(every)} queries were found"
        missing = every
        end = time.monotonic() + SECONDS
        while missing and time.monotonic() < end:
            missing = [query for query in missing if not has_data(prometheus, query[1])]
            time.sleep(1)
        for place, promql in missing:
            print(f"no data: {place}\n  {promql}", file=sys.stderr)
        if missing:
            sys.exit(1)
        ours = "".join(
            line + "\n" for line in get(server + "/metrics").splitlines() if "vllm:" not in line
        )
        subprocess.run(["promtool", "check", "metrics"], input=ours.encode(), check=True)
        print(f"all {len(every)} queries returned data")
        if options.pictures:
            draw_dashboards(prometheus, load, load_started)
        if options.keep:
            for test in load:
                test.wait()
            for name in TENANTS:
                print(f"\ntenant {name}\n" + (options.work / f"{name}.log").read_text())
            print(f"server {server}, Prometheus {prometheus}; Ctrl-C ends both")
            started[0].wait()
    except KeyboardInterrupt:
        pass
    finally:
        for process in load + started:
            process.kill()
            process.wait()


main()
