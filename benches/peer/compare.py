"""Measures Sterna and llama.cpp's llama-server side by side, with one client on one machine.

Each repetition starts each server alone, drives it with `sterna-loadtest` and ends it. The order
of the servers rotates. Sampling is greedy. All servers get the same texts, and answers have a
fixed length. The figures are:

- prefill: one request of 512 tokens with one output token; prompt tokens over the request's time;
- one stream: 128 tokens in, 64 out; the 63 tokens after the first over their time;
- as many clients at once as --clients says, each 128 tokens in, 64 out: output tokens per second
  over the whole time, time to first token, and the longest time between two pieces of text of one
  answer;
- memory: the process's VmHWM at the end, which includes mapped weights;
- start: the time from exec to ready.

Prompts are whole words, so they have a few tokens more or less. Rates use the actual numbers of
tokens, which the output lists.

The program ends with an error message and exit code 1 if a request failed, if an answer has another
length, or if the engines count the tokens of a prompt differently. It needs only Python's standard
library.

With --alone the program measures one client at a time, sends the requests itself, and leaves out
the many clients. `sterna-loadtest` first sends a text of about 290 tokens to count its tokens. A
server that computes 2 tokens a second needs two minutes for it.
"""

import argparse
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

PREFILL_TOKENS, PROMPT_TOKENS, OUTPUT_TOKENS = 512, 128, 64
QUICK_PREFILL_TOKENS, QUICK_PROMPT_TOKENS, QUICK_OUTPUT_TOKENS = 64, 48, 8
# Sequences that each server has memory for, and the clients if --clients does not say it.
STREAMS = 16
# KV tokens of each sequence: the longest prompt, its answer, the chat template, and a margin.
SEQUENCE_TOKENS = 640
READY_SECONDS, END_SECONDS = 180, 40

FIGURES = [  # name, label and unit, digits, whether more is better
    ("prefill", "prefill of about {prefill} tokens, tok/s", 0, True),
    ("one_stream", "one stream, tok/s", 1, True),
    ("peak_memory", "peak resident memory, GB", 2, False),
    ("start", "start to ready, s", 1, False),
]
CLIENTS_FIGURES = [  # the same, for each number of clients
    ("streams", "{clients} clients, output tok/s", 1, True),
    ("ttft_p50", "{clients} clients, TTFT p50, s", 2, False),
    ("longest_gap", "{clients} clients, longest gap between tokens, s", 2, False),
]

NOTE = (
    "Each server ran alone, with the same client on the same cores, random weights and greedy "
    "sampling. Memory includes mapped weights. Each answer has its full length. Sterna drafts no "
    "tokens (--speculate 0)."
)
OWN_FILES_NOTE = (
    "llama.cpp's graph of this architecture has SiLU where the model squares a ReLU, and its "
    "lm_head is Q6_K."
)
SAME_WEIGHTS_NOTE = "Sterna loaded the {type} file. All files have the same weights."


class NoResult(Exception):
    """The reason why there is no result."""


def main():
    args = parse()
    engines = [sterna(args)] + [llama(args, Path(path)) for path in args.gguf]
    results = {engine["name"]: [] for engine in engines}
    bandwidths = []
    try:
        for repetition in range(args.repetitions):
            bandwidths += sample_bandwidth(args)
            first = repetition % len(engines)
            for engine in engines[first:] + engines[:first]:
                figures = measure(engine, args, seed=repetition + 1)
                results[engine["name"]].append(figures)
                progress = f"{repetition + 1}/{args.repetitions}"
                log(f"{progress} {engine['name']}: {summary(figures, args.clients)}")
            check_prompts(results)
        bandwidths += sample_bandwidth(args)
    except NoResult as reason:
        print(f"compare: {reason}", file=sys.stderr)
        sys.exit(1)
    report = {
        "machine": machine(args),
        "shared_type": shared_type(args),
        "bandwidth_gb_per_s": bandwidths,
        "versions": {engine["name"]: engine["version"] for engine in engines},
        "commands": {
            engine["name"]: " ".join(map(shortened, engine["command"](0))) for engine in engines
        },
        "repetitions": results,
        "medians": {
            name: medians(figures, args.clients) for name, figures in results.items()
        },
    }
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(table(report))


def parse():
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--sterna", required=True, help="Sterna's server binary")
    flags.add_argument("--loadtest", required=True, help="the binary of sterna-loadtest")
    flags.add_argument(
        "--model", required=True, help="Sterna's checkpoint: a directory or one of the GGUF files"
    )
    flags.add_argument("--llama-server", required=True, help="llama.cpp's server binary")
    flags.add_argument("--llama-version", default="", help="version of llama-server, for the table")
    flags.add_argument(
        "--gguf", nargs="+", required=True, help="GGUF files for llama-server, named TYPE.gguf"
    )
    flags.add_argument("--bandwidth", help="program that prints the read bandwidth in GB/s")
    flags.add_argument("--threads", type=int, default=2, help="compute threads of each server")
    flags.add_argument("--repetitions", type=int, default=3, help="runs of each server")
    flags.add_argument(
        "--quick", action="store_true", help="one run with few clients and tokens, as a check"
    )
    flags.add_argument(
        "--clients", type=int, nargs="+", default=[STREAMS], help="numbers of clients"
    )
    flags.add_argument(
        "--alone", action="store_true", help="measure one client at a time, not many at once"
    )
    flags.add_argument("--logs", type=Path, required=True, help="folder for the servers' logs")
    flags.add_argument("--json", help="file for all figures, as JSON")
    args = flags.parse_args()
    args.prefill, args.prompt = PREFILL_TOKENS, PROMPT_TOKENS
    args.output = OUTPUT_TOKENS
    if args.quick:
        args.prefill, args.prompt = QUICK_PREFILL_TOKENS, QUICK_PROMPT_TOKENS
        args.output, args.repetitions = QUICK_OUTPUT_TOKENS, 1
        args.clients = [max(2, clients // 4) for clients in args.clients]
    if args.alone:
        args.clients = []
    return args


def log(text):
    print(text, file=sys.stderr, flush=True)


def shortened(argument):
    """Returns a command line argument without the folder of this run."""
    return Path(argument).name if os.path.isabs(str(argument)) else str(argument)


# ---------------------------------------------------------------- engines


def sterna(args):
    inspect = [args.sterna, "inspect", "--json", args.model]
    report = subprocess.run(inspect, check=True, capture_output=True, text=True).stdout
    report = json.loads(report)
    model = report["model"]
    # Recurrent layers have no keys.
    key_tensors = (".self_attn.k_proj.weight", ".attn_k.weight")
    layers = sum(t["count"] for t in report["tensors"] if t["kind"].endswith(key_tensors))
    token_bytes = layers * 2 * model["kv_heads"] * model["head_dim"] * 2
    mebibytes = -(-STREAMS * SEQUENCE_TOKENS * token_bytes // 2**20)
    flags = ["--threads", str(args.threads), "--kv-memory", f"{mebibytes}MiB"]
    # This bounds the memory for states of recurrent layers, as llama-server's slots do.
    flags += ["--max-running", str(STREAMS)]
    # No draft tokens: random weights may repeat themselves, and llama-server does not draft.
    # A long queue limit: on a slow machine Sterna would reject requests that llama-server accepts.
    flags += ["--speculate", "0", "--max-queued-seconds", "3600"]
    version = subprocess.run(
        [args.sterna, "--version"], check=True, capture_output=True, text=True
    ).stdout.strip()
    return {
        "name": "Sterna",
        "version": version,
        "command": lambda port: [args.sterna, "--model", args.model, "--port", str(port), *flags],
        "ready": "/ready",
    }


def llama(args, path):
    flags = ["--threads", str(args.threads), "--threads-batch", str(args.threads)]
    # One slot per client, each with its own cache; no saved prompts or states, and no web page.
    flags += ["--parallel", str(STREAMS), "--ctx-size", str(STREAMS * SEQUENCE_TOKENS)]
    flags += ["--no-kv-unified", "--cache-ram", "0", "--no-cache-prompt", "--no-ui"]
    flags += ["--ctx-checkpoints", "0"]
    flags += ["--jinja", "--reasoning-format", "none"]
    return {
        "name": f"llama.cpp {path.stem.upper()}",
        "version": args.llama_version,
        "command": lambda port: [
            args.llama_server, "--model", str(path), "--port", str(port), *flags
        ],
        "ready": "/health",
    }


def shared_type(args):
    """Returns the type of the file that Sterna loads too, so that all have the same weights."""
    model = Path(args.model)
    return model.stem.upper() if model.suffix == ".gguf" else None


class Server:
    """A running server. The end of the `with` block always ends it."""

    def __init__(self, engine, args):
        self.engine = engine
        self.log = args.logs / f"{engine['name'].replace(' ', '-')}.log"

    def __enter__(self):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        started = time.monotonic()
        with open(self.log, "ab") as log_file:
            command = self.engine["command"](port)
            self.process = subprocess.Popen(command, stdout=log_file, stderr=log_file)
        try:
            while not self.is_ready():
                name = self.engine["name"]
                if self.process.poll() is not None:
                    raise NoResult(f"{name} exited during its start:\n{self.log_end()}")
                if time.monotonic() - started > READY_SECONDS:
                    message = f"{name} was not ready after {READY_SECONDS} s"
                    raise NoResult(f"{message}:\n{self.log_end()}")
                time.sleep(0.05)
        except BaseException:
            self.end()
            raise
        self.start_seconds = time.monotonic() - started
        return self

    def __exit__(self, *_):
        self.end()

    def is_ready(self):
        try:
            with get(self.url + self.engine["ready"]) as response:
                return response.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def peak_bytes(self):
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        for line in status.splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise NoResult(f"{self.engine['name']}: its process status has no VmHWM")

    def log_end(self):
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-20:])


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def get(url):
    """Opens a URL or a request without a proxy."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=600)


# ---------------------------------------------------------------- measurements


def measure(engine, args, seed):
    """Starts one server, measures all figures and ends it."""
    with Server(engine, args) as server:
        one = ask if args.alone else drive
        prefill = one(args, server, seed, 1, args.prefill, 1)
        alone = one(args, server, seed + 100, 1, args.prompt, args.output)
        crowds = [
            drive(args, server, seed + 200 + 100 * index, clients, args.prompt, args.output)
            for index, clients in enumerate(args.clients)
        ]
        peak = server.peak_bytes()
    decoding = alone["end_to_end_seconds"]["max"] - alone["time_to_first_token_seconds"]["max"]
    figures = {
        "prefill": prefill["prompt_tokens"] / prefill["end_to_end_seconds"]["max"],
        "one_stream": (args.output - 1) / decoding,
        "peak_memory": peak / 1e9,
        "start": server.start_seconds,
        "prompt_tokens": [run["prompt_tokens"] for run in (prefill, alone, *crowds)],
    }
    for clients, crowd in zip(args.clients, crowds):
        figures[f"streams_{clients}"] = crowd["output_tokens_per_second"]
        figures[f"ttft_p50_{clients}"] = crowd["time_to_first_token_seconds"]["p50"]
        figures[f"longest_gap_{clients}"] = crowd["inter_token_seconds"]["max"]
    return figures


def drive(args, server, seed, clients, prompt_tokens, output_tokens):
    """Runs the load test once: each client sends one request, all at the same time."""
    name = server.engine["name"]
    command = [args.loadtest, "drive", "--json", "--url", server.url, "--ignore-eos"]
    # With Q2_0, an answer to one of 16 clients takes llama-server half an hour.
    command += ["--timeout-seconds", "3600"]
    command += ["--prompt-spread", "0", "--seed", str(seed)]
    command += ["--clients", str(clients), "--requests", str(clients)]
    command += ["--prompt-tokens", str(prompt_tokens), "--max-tokens", str(output_tokens)]
    for attempt in range(20):
        done = subprocess.run(command, capture_output=True, text=True)
        # llama-server's HTTP library sometimes closes a connection without an answer. Such a run
        # is repeated. The server caches nothing of it.
        output = done.stdout + done.stderr
        if done.returncode == 0 or "closed before message completed" not in output:
            break
        log(f"{name} closed a connection without an answer ({attempt + 1}); repeating the run")
        time.sleep(1)
    if done.returncode != 0:
        raise NoResult(f"{name}, {clients} clients:\n{output[-2000:]}\n{server.log_end()}")
    report = json.loads(done.stdout)
    if report["output_tokens"] != clients * output_tokens:
        found = report["output_tokens"] / clients
        raise NoResult(f"{name} returned {found:.1f} tokens per answer instead of {output_tokens}")
    cached, prompt = report["cached_tokens"], report["prompt_tokens"]
    if cached > prompt / 10:
        raise NoResult(f"{name} had {cached} of {prompt} prompt tokens in its cache")
    return report


def ask(_, server, seed, clients, prompt_tokens, output_tokens):
    """Sends one request of random words, and returns what `drive` reports of it."""
    assert clients == 1, "one request"
    choose = random.Random(seed)
    # Three letters and a space are about two tokens of the small vocabulary of these shapes.
    words = ("".join(choose.choices("etaoinshr", k=3)) for _ in range(prompt_tokens // 2))
    body = {"messages": [{"role": "user", "content": " ".join(words)}], "temperature": 0}
    body |= {"max_tokens": output_tokens, "ignore_eos": True, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    request = urllib.request.Request(
        server.url + "/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    started, first, usage = time.monotonic(), None, None
    with get(request) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[len(b"data: ") :])
            usage = event.get("usage") or usage
            choices = event.get("choices")
            if choices and choices[0]["delta"].get("content") and first is None:
                first = time.monotonic() - started
    seconds = time.monotonic() - started
    if not usage or usage["completion_tokens"] != output_tokens or first is None:
        raise NoResult(f"{server.engine['name']}: not {output_tokens} tokens: {usage}")
    return {
        "prompt_tokens": usage["prompt_tokens"],
        "end_to_end_seconds": {"max": seconds},
        "time_to_first_token_seconds": {"max": first},
    }


def check_prompts(results):
    """Checks that all engines count the same number of tokens in the same texts."""
    counts = {name: figures[-1]["prompt_tokens"] for name, figures in results.items()}
    if len({tuple(count) for count in counts.values()}) > 1:
        raise NoResult(f"the engines count the tokens of the same prompts differently: {counts}")


def sample_bandwidth(args):
    if not args.bandwidth:
        return []
    command = [args.bandwidth, str(args.threads)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [float(done.stdout)]


def medians(repetitions, clients):
    names = [name for name, *_ in rows(clients)]
    return {name: statistics.median(one[name] for one in repetitions) for name in names}


def machine(args):
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()

    def field(name):
        values = (line.split(":", 1)[1].strip() for line in info if line.startswith(name))
        return next(values, "unknown")

    known = ["avx2", "avx512f", "avx512bw", "avx512_vnni", "avx512vbmi", "avx512_bf16"]
    known += ["avx_vnni", "amx_int8"]
    flags = set(field("flags").split())
    return {
        "cpu": f"{field('model name')} (family {field('cpu family')}, model {field('model')})",
        "cores": len(os.sched_getaffinity(0)),
        "isa": [flag for flag in known if flag in flags],
        "kernel": platform.release(),
        "threads": args.threads,
        "prefill": args.prefill,
        "clients": args.clients,
        "date": time.strftime("%Y-%m-%d"),
    }


# ---------------------------------------------------------------- output


def rows(clients):
    """Returns the figures of a run with these numbers of clients, in the order of the table."""
    of_clients = [
        (f"{name}_{count}", label.format(clients=count), *rest)
        for count in clients
        for name, label, *rest in CLIENTS_FIGURES
    ]
    return FIGURES[:2] + of_clients + FIGURES[2:]


def summary(figures, clients):
    measured = [(name, digits) for name, _, digits, _ in rows(clients)]
    return ", ".join(f"{name} {figures[name]:.{digits}f}" for name, digits in measured)


def table(report):
    info, names = report["machine"], list(report["medians"])
    isa = " ".join(info["isa"])
    lines = [f"{info['cpu']}, {info['cores']} cores, {isa}, {info['date']}"]
    bandwidths = report["bandwidth_gb_per_s"]
    if bandwidths:
        low, high = min(bandwidths), max(bandwidths)
        lines.append(f"read bandwidth during the run: {low:.0f} to {high:.0f} GB/s")
    for name in names:
        lines.append(f"{name}: {report['versions'][name]}; {report['commands'][name]}")
    count = len(next(iter(report["repetitions"].values())))
    prompts = [figures["prompt_tokens"] for figures in report["repetitions"][names[0]]]
    lines.append(f"median of {count} runs (lowest and highest); ×: Sterna's figure over this one")
    lines.append(f"prompt tokens of each run (prefill, one stream, all clients): {prompts}")
    lines += ["", f"| {info['threads']} threads | {' | '.join(names)} |"]
    lines.append("|---" * (len(names) + 1) + "|")
    for name, label, digits, more_is_better in rows(info["clients"]):
        middles = [report["medians"][engine][name] for engine in names]
        best = (max if more_is_better else min)(middles)
        cells = []
        for engine, middle in zip(names, middles):
            values = [figures[name] for figures in report["repetitions"][engine]]
            text = f"{middle:.{digits}f}"
            text = f"**{text}**" if middle == best else text
            ratio = "" if engine == names[0] else f" ×{middles[0] / middle:.2f}"
            cells.append(f"{text} ({min(values):.{digits}f}–{max(values):.{digits}f}){ratio}")
        lines.append(f"| {label.format(**info)} | {' | '.join(cells)} |")
    shared = report["shared_type"]
    lines += ["", NOTE, SAME_WEIGHTS_NOTE.format(type=shared) if shared else OWN_FILES_NOTE]
    return "\n".join(lines)


if __name__ == "__main__":
    # SIGTERM must unwind the `with` block that ends the server.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    main()
