#!/usr/bin/env python3
"""Measures what streams cost beside the model, what grammars do to the neighbours, and drafts.

    cargo build --release --workspace
    benches/streams.py                                # the demo model, about seven minutes

- cost: 64 chats stream at the same time. Reading requests, text, JSON and events take at most 50 us
  of the processor for each streamed token: all threads count but those of the engine and the model.
- grammars: 16 chats stream beside 16 others. The 99th percentile of the times between two tokens is
  at most 1.1 times as long if the others follow a JSON schema as if they follow none. The two kinds
  of neighbours take turns.

- drafts: tokens per second of 1, 2, 4 and 16 clients that ask held-out questions, without drafts
  and with those that are looked up, those of the model itself, and both, and by diffusion. The
  servers take turns, and the ratios are medians over the turns. Self-speculation must not be slower
  than drafts that are looked up by more than 2 %.

Exits with 1 if a bar is missed. Let nothing else run meanwhile.
"""

import argparse
import asyncio
import collections
import contextlib
import json
import pathlib
import re
import statistics
import subprocess
import sys
import time
import urllib.request

RELEASE = pathlib.Path(__file__).resolve().parents[1] / "target" / "release"
MODEL_THREADS = ("sterna-engine", "sterna-worker")
TICKS = 100  # In a second, in /proc.
PART = 0.4  # Seconds that a server of `drafts` gets the clients.
PERSON = {
    "type": "array",
    "minItems": 40,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
}
GRAMMAR = {"response_format": {"type": "json_schema", "json_schema": {"schema": PERSON}}}


def main():
    scenes = {"cost": cost, "grammars": grammars, "drafts": drafts}
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="a checkpoint; the demo if absent")
    parser.add_argument("--scene", choices=scenes, action="append", help="run only this scene")
    parser.add_argument("--seconds", type=float, default=10, help="the length of each part")
    args = parser.parse_args()
    missed = False
    wanted = args.scene or list(scenes)
    if "drafts" in wanted:
        wanted.remove("drafts")
        missed |= drafts(args.model, args.seconds)
    if not wanted:
        sys.exit(1 if missed else 0)
    with serving(args.model) as server:
        for scene in wanted:
            name, found, most, unit = asyncio.run(scenes[scene](*server, args.seconds))
            missed |= found > most
            late = "  MISSED" if found > most else ""
            print(f"{name:<58}{found:>7.2f} {unit}at most {most}{late}")
    sys.exit(1 if missed else 0)


async def cost(port, pid, seconds):
    await chats(port, [{}] * 64, 2)
    before = processor(pid)
    tokens, _ = await chats(port, [{}] * 64, 2 * seconds)
    after = processor(pid)
    used = {name: after[name] - before.get(name, 0) for name in after}
    for name, spent in sorted(used.items(), key=lambda item: -item[1]):
        print(f"  {name:<20}{1e6 * spent / tokens:>8.1f} us for each of {tokens} tokens")
    beside = sum(spent for name, spent in used.items() if not name.startswith(MODEL_THREADS))
    found = 1e6 * beside / tokens
    return "64 streams: processor for each token beside the model", found, 50, "us, "


async def grammars(port, pid, seconds):
    ratios = []
    for turn in range(6):
        neighbours = {"free": {}, "grammar": GRAMMAR}
        percentile = {}
        for kind in sorted(neighbours, reverse=turn % 2 == 0):
            bodies = [{}] * 16 + [neighbours[kind]] * 16
            _, gaps = await chats(port, bodies, seconds / 2)
            of_chats = sorted(gap for chat in gaps[:16] for gap in chat)
            percentile[kind] = of_chats[len(of_chats) * 99 // 100]
        ratios.append(percentile["grammar"] / percentile["free"])
        print("  p99 " + ", ".join(f"{kind} {1e3 * p:.1f} ms" for kind, p in percentile.items()))
    found = statistics.median(ratios)
    return "inter-token p99 beside 16 grammars / beside 16 others", found, 1.1, ""


DRAFTS = {
    "none": ["--decoding", "autoregressive", "--speculate", "0"],
    "looked up": ["--decoding", "autoregressive"],
    "of the model": ["--decoding", "self-speculation", "--speculate", "0"],
    "both": ["--decoding", "self-speculation"],
    "diffusion": ["--decoding", "diffusion"],
    "diffusion with a block cache": ["--decoding", "diffusion", "--diffusion-block-cache"],
}


def drafts(model, seconds):
    """Prints tokens per second by clients and kinds of drafts. Returns whether a bar is missed.

    All servers are up, and one after the other gets the clients for a part of a second. So what the
    machine does meanwhile meets all of them."""
    with contextlib.ExitStack() as servers:
        ports = {}
        for kind, flags in DRAFTS.items():
            ports[kind], _ = servers.enter_context(serving(model, flags, greets=False))
            asyncio.run(questions(ports[kind], 1, 0.5))
        return any([missed_by(ports, clients, seconds) for clients in (1, 2, 4, 16)])


def missed_by(ports, clients, seconds):
    speeds = {kind: [] for kind in ports}
    before = {kind: counts(port) for kind, port in ports.items()}
    turns = list(ports)
    for _ in range(round(seconds / PART)):
        turns.append(turns.pop(0))
        for kind in turns:
            speeds[kind].append(asyncio.run(questions(ports[kind], clients, PART)))
    made = {kind: counts(port) - before[kind] for kind, port in ports.items()}
    ratios = {
        kind: statistics.median(one / none for one, none in zip(found, speeds["none"]))
        for kind, found in speeds.items()
    }
    figures = ", ".join(
        f"{kind} {statistics.median(found):.0f} (x{ratios[kind]:.2f})"
        for kind, found in speeds.items()
    )
    print(f"  {clients} clients, tok/s with drafts: {figures}")
    for kind, count in made.items():
        drafted = count["vllm:spec_decode_num_draft_tokens_total"]
        passes = count["sterna_block_passes_total"]
        unmasked = count["sterna_unmasked_tokens_total"]
        if drafted:
            share = count["vllm:spec_decode_num_accepted_tokens_total"] / drafted
            print(f"    {kind}: {100 * share:.0f} % of {drafted:.0f} drafts accepted")
        if passes:
            prompts = count["vllm:prompt_tokens_total"] - count["vllm:prefix_cache_hits_total"]
            rows = count["vllm:iteration_tokens_total_sum"] - prompts
            made_of = f"{unmasked / passes:.2f} tokens of {rows / passes:.1f} rows a pass"
            print(f"    {kind}: {made_of}")
    pairs = zip(speeds["both"], speeds["looked up"])
    return statistics.median(both / looked_up for both, looked_up in pairs) < 0.98


def counts(port):
    """Returns the server's metrics by name, added over their labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    found = collections.Counter()
    for line in lines:
        if line and not line.startswith("#"):
            series, value = line.rsplit(" ", 1)
            found[series.split("{")[0]] += float(value)
    return found


async def questions(port, clients, seconds):
    """Returns the tokens per second of clients that ask one held-out question after the other."""
    file = pathlib.Path(__file__).resolve().parent / "training" / "heldout.json"
    asked = [single["question"] for single in json.loads(file.read_text())["singles"]]
    started = time.monotonic()

    async def client(number):
        tokens = 0
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.monotonic() < started + seconds:
            question = asked[number % len(asked)]
            number += clients
            body = {"messages": [{"role": "user", "content": question}], "temperature": 0}
            text = json.dumps(body).encode()
            head = "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
            head += f"content-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
            writer.write(head.encode() + text)
            length = 0
            while line := (await reader.readline()).strip().lower():
                if line.startswith(b"content-length:"):
                    length = int(line.split()[1])
            answer = json.loads(await reader.readexactly(length))
            tokens += answer["usage"]["completion_tokens"]
        writer.close()
        return tokens

    found = await asyncio.gather(*(client(number) for number in range(clients)))
    return sum(found) / (time.monotonic() - started)


async def chats(port, bodies, seconds):
    """Runs a chat for each body, one request after the other. Returns the number of tokens, and for
    each chat the times between its tokens."""
    end = time.monotonic() + seconds
    results = await asyncio.gather(
        *(chat(port, number, body, end) for number, body in enumerate(bodies))
    )
    return sum(tokens for tokens, _ in results), [gaps for _, gaps in results]


async def chat(port, number, extra, end):
    tokens, gaps = 0, []
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = 0
    while time.monotonic() < end:
        request += 1
        question = f"Tell me about the number {number} and the number {request}."
        body = {
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 300,
            "temperature": 1,
            "seed": request,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if not extra:
            body["ignore_eos"] = True
        text = json.dumps(body | extra).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
        writer.write(head.encode() + text)
        last = None
        while (line := await reader.readline()) != b"data: [DONE]\n":
            if line.startswith(b"HTTP/1.1 ") and b" 200 " not in line or not line:
                sys.exit(f"the server answers {line}")
            if b'"usage":{' in line:
                tokens += json.loads(line[6:])["usage"]["completion_tokens"]
            elif line.startswith(b"data: ") and b'"content"' in line:
                now = time.monotonic()
                if last is not None:
                    gaps.append(now - last)
                last = now
        while await reader.readline() != b"0\r\n":
            pass  # The end of the chunk, and the last chunk.
        await reader.readline()
    writer.close()
    return tokens, gaps


def processor(pid):
    """Returns the seconds of processor that the threads of each name have used."""
    used = {}
    for thread in pathlib.Path(f"/proc/{pid}/task").iterdir():
        head, _, rest = (thread / "stat").read_text().rpartition(")")
        name = re.sub(r"[-\d]+$", "", head.partition("(")[2])
        fields = rest.split()
        used[name] = used.get(name, 0) + (int(fields[11]) + int(fields[12])) / TICKS
    return used


@contextlib.contextmanager
def serving(model, flags=(), greets=True):
    command = [RELEASE / "sterna", "--port", "0", "--max-running", "64", *flags]
    command += ["--model", model] if model else []
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        greeting = ""
        while not (port := re.search(r"http://127\.0\.0\.1:(\d+)", greeting)):
            greeting = server.stdout.readline()
            if not greeting:
                sys.exit("the server does not start")
        if greets:
            print(greeting.strip())
        yield int(port[1]), server.pid
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
