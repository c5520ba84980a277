"""Measures Sterna and llama.cpp's llama-server side by side: one client, one machine, one run.

Each repetition starts each server in turn (alone, in an order that rotates), drives it with `sterna-loadtest` and ends it. What
is measured, greedy, with the same texts and answers of fixed length:

- prefill: one request of 512 tokens that asks for one token; prompt tokens over the time of the whole request;
- one stream: 128 tokens in, 64 out; the 63 tokens after the first over their time;
- 16 clients at once, 128 in, 64 out each: output tokens a second over the whole time, time to first token, and the longest time
  that any of them waited between two pieces of text;
- memory: the process's VmHWM at the end, mapped weights included; start: from exec to ready.

Prompts are whole words, so they have a few tokens more or less; the rates are of those there were, and the table says how many.

A run in which a request failed, an answer had another length, or the engines counted prompts differently, is no result: it ends
with what was wrong and exit code 1. Needs nothing beyond Python's standard library.
"""

import argparse
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

PREFILL_TOKENS, PROMPT_TOKENS, OUTPUT_TOKENS, STREAMS = 512, 128, 64, 16
QUICK_PREFILL_TOKENS, QUICK_PROMPT_TOKENS, QUICK_OUTPUT_TOKENS, QUICK_STREAMS = 64, 48, 8, 4
# Room for each sequence: the longest prompt, its answer, and what the chat template and uneven words add.
SEQUENCE_TOKENS = 640
READY_SECONDS, END_SECONDS = 180, 40

FIGURES = [  # name, words and unit, digits, is more better
    ("prefill", "prefill of about {prefill} tokens, tok/s", 0, True),
    ("one_stream", "one stream, tok/s", 1, True),
    ("streams", "{streams} clients, output tok/s", 1, True),
    ("ttft_p50", "{streams} clients, TTFT p50, s", 2, False),
    ("longest_gap", "{streams} clients, longest gap between tokens, s", 2, False),
    ("peak_memory", "peak resident memory, GB", 2, False),
    ("start", "start to ready, s", 1, False),
]

NOTE = (
    "Each server alone, in turn; the same client on the same cores; random weights; greedy; memory includes mapped weights. "
    "llama.cpp's graph of this architecture has SiLU where the model squares a ReLU; its head is Q6_K. "
    "Each answer has its full length, and Sterna does not guess ahead (--speculate 0)."
)


class Wrong(Exception):
    """Why there is no result."""


def main():
    args = parse()
    engines = [sterna(args)] + [llama(args, Path(path)) for path in args.gguf]
    results = {engine["name"]: [] for engine in engines}
    bandwidths = []
    try:
        for repetition in range(args.repetitions):
            bandwidths += sample_bandwidth(args)
            turn = repetition % len(engines)
            for engine in engines[turn:] + engines[:turn]:
                figures = measure(engine, args, seed=repetition + 1)
                results[engine["name"]].append(figures)
                note(f"{repetition + 1}/{args.repetitions} {engine['name']}: {brief(figures)}")
            check_prompts(results)
        bandwidths += sample_bandwidth(args)
    except Wrong as wrong:
        print(f"compare: {wrong}", file=sys.stderr)
        sys.exit(1)
    report = {
        "machine": machine(args),
        "bandwidth_gb_per_s": bandwidths,
        "versions": {engine["name"]: engine["version"] for engine in engines},
        "commands": {engine["name"]: " ".join(map(shown, engine["command"](0))) for engine in engines},
        "repetitions": results,
        "medians": {name: medians(figures) for name, figures in results.items()},
    }
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(table(report))


def parse():
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--sterna", required=True, help="the server's binary")
    flags.add_argument("--loadtest", required=True, help="the load tester's binary")
    flags.add_argument("--model", required=True, help="Sterna's checkpoint")
    flags.add_argument("--llama-server", required=True)
    flags.add_argument("--llama-version", default="", help="which package it is from")
    flags.add_argument("--gguf", nargs="+", required=True, help="files for llama-server, TYPE.gguf")
    flags.add_argument("--bandwidth", help="program that prints the machine's read bandwidth in GB/s")
    flags.add_argument("--threads", type=int, default=2)
    flags.add_argument("--repetitions", type=int, default=3)
    flags.add_argument("--quick", action="store_true", help="few clients and tokens, once: does every part work?")
    flags.add_argument("--logs", type=Path, required=True, help="folder for what the servers print")
    flags.add_argument("--json", help="file for every figure")
    args = flags.parse_args()
    args.prefill, args.prompt, args.output, args.streams = PREFILL_TOKENS, PROMPT_TOKENS, OUTPUT_TOKENS, STREAMS
    if args.quick:
        args.prefill, args.prompt = QUICK_PREFILL_TOKENS, QUICK_PROMPT_TOKENS
        args.output, args.streams, args.repetitions = QUICK_OUTPUT_TOKENS, QUICK_STREAMS, 1
    return args


def note(text):
    print(text, file=sys.stderr, flush=True)


def shown(part):
    """A part of a command line without the folder of this run."""
    return Path(part).name if os.path.isabs(str(part)) else str(part)


# ---------------------------------------------------------------- the engines


def sterna(args):
    config = json.loads((Path(args.model) / "config.json").read_text(encoding="utf-8"))
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    token_bytes = config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head_dim * 2
    mebibytes = -(-STREAMS * SEQUENCE_TOKENS * token_bytes // 2**20)
    flags = ["--threads", str(args.threads), "--kv-memory", f"{mebibytes}MiB"]
    # No guesses from the text's own past: random weights may repeat themselves, and llama-server does not guess. And nobody is
    # refused because the wait would be long, on however slow a machine: llama-server takes all.
    flags += ["--speculate", "0", "--max-queued-seconds", "3600"]
    version = subprocess.run([args.sterna, "--version"], check=True, capture_output=True, text=True).stdout.strip()
    return {
        "name": "Sterna",
        "version": version,
        "command": lambda port: [args.sterna, "--model", args.model, "--port", str(port), *flags],
        "ready": "/ready",
    }


def llama(args, path):
    flags = ["--threads", str(args.threads), "--threads-batch", str(args.threads)]
    # As many slots as clients, each with a cache of its own; no copies of old prompts on the side, no web page.
    flags += ["--parallel", str(STREAMS), "--ctx-size", str(STREAMS * SEQUENCE_TOKENS), "--no-kv-unified"]
    flags += ["--cache-ram", "0", "--no-cache-prompt", "--no-ui", "--jinja", "--reasoning-format", "none"]
    return {
        "name": f"llama.cpp {path.stem.upper()}",
        "version": args.llama_version,
        "command": lambda port: [args.llama_server, "--model", str(path), "--port", str(port), *flags],
        "ready": "/health",
    }


class Server:
    """A running server; whatever happens in the `with` block, it is ended."""

    def __init__(self, engine, args):
        self.engine = engine
        self.log = args.logs / f"{engine['name'].replace(' ', '-')}.log"

    def __enter__(self):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        begun = time.monotonic()
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(self.engine["command"](port), stdout=log, stderr=log)
        try:
            while not self.is_ready():
                if self.process.poll() is not None:
                    raise Wrong(f"{self.engine['name']} ended while starting:\n{self.last_words()}")
                if time.monotonic() - begun > READY_SECONDS:
                    raise Wrong(f"{self.engine['name']} was not ready after {READY_SECONDS} s:\n{self.last_words()}")
                time.sleep(0.05)
        except BaseException:
            self.end()
            raise
        self.start_seconds = time.monotonic() - begun
        return self

    def __exit__(self, *_):
        self.end()

    def is_ready(self):
        try:
            with ask(self.url + self.engine["ready"]) as response:
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
        for line in Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise Wrong(f"{self.engine['name']}: no VmHWM in its status")

    def last_words(self):
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:])


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def ask(url, body=None):
    """Opens `url` without a proxy."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=120)


# ---------------------------------------------------------------- measuring


def measure(engine, args, seed):
    """All figures of one life of one server."""
    with Server(engine, args) as server:
        prefill = drive(args, server, seed, 1, args.prefill, 1)
        alone = drive(args, server, seed + 100, 1, args.prompt, args.output)
        crowd = drive(args, server, seed + 200, args.streams, args.prompt, args.output)
        peak = server.peak_bytes()
    decoding = alone["end_to_end_seconds"]["max"] - alone["time_to_first_token_seconds"]["max"]
    return {
        "prefill": prefill["prompt_tokens"] / prefill["end_to_end_seconds"]["max"],
        "one_stream": (args.output - 1) / decoding,
        "streams": crowd["output_tokens_per_second"],
        "ttft_p50": crowd["time_to_first_token_seconds"]["p50"],
        "longest_gap": crowd["inter_token_seconds"]["max"],
        "peak_memory": peak / 1e9,
        "start": server.start_seconds,
        "prompt_tokens": [prefill["prompt_tokens"], alone["prompt_tokens"], crowd["prompt_tokens"]],
    }


def drive(args, server, seed, clients, prompt_tokens, output_tokens):
    """One run of the load tester: as many requests as clients, all at once."""
    command = [args.loadtest, "drive", "--json", "--url", server.url, "--ignore-eos", "--prompt-spread", "0"]
    command += ["--clients", str(clients), "--requests", str(clients), "--seed", str(seed)]
    command += ["--prompt-tokens", str(prompt_tokens), "--max-tokens", str(output_tokens)]
    for attempt in range(5):
        done = subprocess.run(command, capture_output=True, text=True)
        # llama-server's HTTP library now and then closes a connection unanswered. Such a run is made again; nothing of it is cached.
        if done.returncode == 0 or "closed before message completed" not in done.stdout + done.stderr:
            break
        print(f"{server.engine['name']} closed a connection unanswered ({attempt + 1}); again", file=sys.stderr)
        time.sleep(1)
    if done.returncode != 0:
        words = (done.stdout + done.stderr)[-2000:]
        raise Wrong(f"{server.engine['name']}, {clients} clients:\n{words}\n{server.last_words()}")
    report = json.loads(done.stdout)
    if report["output_tokens"] != clients * output_tokens:
        found = report["output_tokens"] / clients
        raise Wrong(f"{server.engine['name']} gave {found:.1f} tokens an answer instead of {output_tokens}")
    if report["cached_tokens"] > report["prompt_tokens"] / 10:
        raise Wrong(f"{server.engine['name']} had {report['cached_tokens']} tokens of {report['prompt_tokens']} cached")
    return report


def check_prompts(results):
    """The same texts must be as many tokens to all."""
    counts = {name: figures[-1]["prompt_tokens"] for name, figures in results.items()}
    if len({tuple(count) for count in counts.values()}) > 1:
        raise Wrong(f"the engines count the same prompts differently: {counts}")


def sample_bandwidth(args):
    if not args.bandwidth:
        return []
    done = subprocess.run([args.bandwidth, str(args.threads)], check=True, capture_output=True, text=True)
    return [float(done.stdout)]


def medians(repetitions):
    return {name: statistics.median(one[name] for one in repetitions) for name, *_ in FIGURES}


def machine(args):
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    field = lambda name: next((line.split(":", 1)[1].strip() for line in info if line.startswith(name)), "unknown")
    known = ["avx2", "avx512f", "avx512bw", "avx512_vnni", "avx512vbmi", "avx512_bf16", "avx_vnni", "amx_int8"]
    have = set(field("flags").split())
    return {
        "cpu": f"{field('model name')} (family {field('cpu family')}, model {field('model')})",
        "cores": len(os.sched_getaffinity(0)),
        "isa": [flag for flag in known if flag in have],
        "kernel": platform.release(),
        "threads": args.threads,
        "prefill": args.prefill,
        "streams": args.streams,
        "date": time.strftime("%Y-%m-%d"),
    }


# ---------------------------------------------------------------- saying it


def brief(figures):
    return ", ".join(f"{name} {figures[name]:.{digits}f}" for name, _, digits, _ in FIGURES)


def table(report):
    machine, names = report["machine"], list(report["medians"])
    lines = [f"{machine['cpu']}, {machine['cores']} cores, {' '.join(machine['isa'])}, {machine['date']}"]
    if report["bandwidth_gb_per_s"]:
        low, high = min(report["bandwidth_gb_per_s"]), max(report["bandwidth_gb_per_s"])
        lines.append(f"read bandwidth beside it: {low:.0f} to {high:.0f} GB/s")
    for name in names:
        lines.append(f"{name}: {report['versions'][name]}; {report['commands'][name]}")
    count = len(next(iter(report["repetitions"].values())))
    prompts = [figures["prompt_tokens"] for figures in report["repetitions"][names[0]]]
    lines.append(f"median of {count} (lowest and highest); tokens of the prompts (prefill, one stream, all clients): {prompts}")
    lines += ["", f"| {machine['threads']} threads | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for name, words, digits, more in FIGURES:
        best = (max if more else min)(report["medians"][one][name] for one in names)
        cells = []
        for one in names:
            values = [figures[name] for figures in report["repetitions"][one]]
            middle = report["medians"][one][name]
            text = f"{middle:.{digits}f}"
            text = f"**{text}**" if middle == best else text
            cells.append(f"{text} ({min(values):.{digits}f}–{max(values):.{digits}f})")
        lines.append(f"| {words.format(**machine)} | {' | '.join(cells)} |")
    lines += ["", NOTE]
    return "\n".join(lines)


if __name__ == "__main__":
    # SIGTERM must unwind the `with` that ends the server.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    main()
