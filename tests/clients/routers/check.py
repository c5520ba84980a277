"""Checks two servers of the demo model behind a router: prompts land where their prefix is, keys
and refusals pass through, and the clients of a server that is killed get clean errors. Prints one
line per check.

The script starts and stops the servers and the router, all on free ports of the loopback address.
"""

import argparse
import concurrent.futures
import sys
import threading
import time

import openai
from openai import OpenAI

from servers import MODEL, PATIENCE, Servers

# The first policy of each is the one that `--short` checks.
POLICIES = {
    "vllm-router": ["kv_aware", "cache_aware", "consistent_hash"],
    "smg": ["cache_aware", "consistent_hashing"],
}
flags = argparse.ArgumentParser(description=__doc__)
flags.add_argument("--bin", required=True, help="folder of the server's program")
flags.add_argument("--router", required=True, choices=POLICIES)
flags.add_argument("--short", action="store_true", help="check one policy of the router")
args = flags.parse_args()

FAMILIES, QUESTIONS = 8, 6  # Beginnings of prompts, and prompts with each.
# Policies of consistent hashing read one of these: vllm-router, SMG.
SESSION_HEADERS = ["x-session-id", "x-smg-routing-key"]


def messages(family, question):
    rules = " ".join(f"Rule {rule} of house {family}: be brief." for rule in range(20))
    system = {"role": "system", "content": f"You work for house {family}. {rules}"}
    return [system, {"role": "user", "content": f"What is {question} plus {family}?"}]


def hit_rate(servers):
    """Returns which part of the prompt tokens came from a prefix cache."""
    client = servers.client()
    prompt = cached = 0
    for question in range(QUESTIONS):
        for family in range(FAMILIES):
            answer = client.chat.completions.create(
                model=MODEL,
                messages=messages(family, question),
                max_tokens=4,
                user=f"house-{family}",
                extra_headers={name: f"house-{family}" for name in SESSION_HEADERS},
            )
            prompt += answer.usage.prompt_tokens
            details = answer.usage.prompt_tokens_details
            cached += details.cached_tokens if details else 0
    return cached / prompt


def events_lead_the_router(servers):
    """Asks a server past the router. The router sends the next such prompt to the same server."""
    client = servers.client()
    hits = 0
    for turn in range(12):
        family = 100 + turn
        server = OpenAI(
            base_url=servers.urls[turn % 2] + "/v1",
            api_key=servers.keys["acme"],
            max_retries=0,
            timeout=PATIENCE,
        )
        for asked in (server, client):
            answer = asked.chat.completions.create(
                model=MODEL, messages=messages(family, 1), max_tokens=4
            )
            time.sleep(0.2)  # The events are on their way.
        hits += answer.usage.prompt_tokens_details.cached_tokens > 50
    return hits


def status(call):
    """Returns the status of an answer, and its headers."""
    try:
        raw = call()
        return raw.status_code, raw.headers
    except openai.APIStatusError as error:
        return error.status_code, error.response.headers


def ask(client):
    return client.chat.completions.with_raw_response.create(
        model=MODEL, messages=messages(0, 0), max_tokens=2
    )


def keys_and_refusals_pass(servers):
    assert status(lambda: ask(servers.client("wrong")))[0] == 401
    assert status(lambda: ask(servers.client()))[0] == 200
    small = servers.client("small")
    # Each server counts by itself.
    answers = [status(lambda: ask(small)) for _ in range(len(servers.urls) + 30)]
    refused = [headers for code, headers in answers if code == 429]
    assert refused and {code for code, _ in answers} <= {200, 429}, answers
    assert all(float(headers["retry-after"]) > 0 for headers in refused), refused
    assert status(lambda: ask(servers.client()))[0] == 200


def a_killed_server_hangs_nobody(servers):
    """Kills a server while clients stream. Each request ends: whole, or with an error."""
    ended = {"whole": 0, "error": 0, "after": 0}
    lock, killed, done = threading.Lock(), threading.Event(), threading.Event()

    def run(number):
        client, family = servers.client(), number
        while not done.is_set():
            family = (family + 5) % FAMILIES
            try:
                stream = client.chat.completions.create(
                    model=MODEL,
                    messages=messages(family, number),
                    max_tokens=60,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                finish = [choice.finish_reason for chunk in stream for choice in chunk.choices]
                outcome = "whole" if finish and finish[-1] == "length" else "error"
            except openai.APITimeoutError:
                raise AssertionError("a request hangs")
            except (openai.OpenAIError, OSError):
                outcome = "error"
            except Exception as error:  # What httpx raises in the middle of a stream.
                assert type(error).__module__.startswith("http"), repr(error)
                outcome = "error"
            with lock:
                ended[outcome] += 1
                ended["after"] += outcome == "whole" and killed.is_set()
                if ended["after"] >= 100:
                    done.set()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        clients = [pool.submit(run, number) for number in range(8)]
        time.sleep(1)
        servers.programs[0].kill()
        killed.set()
        end = time.monotonic() + PATIENCE
        while not done.wait(0.1) and time.monotonic() < end:
            failed = [client for client in clients if client.done()]
            if failed:
                break
        done.set()
        for client in clients:
            client.result(PATIENCE)
    assert ended["after"] >= 100, f"too few answers after the kill: {ended}"
    return f"{ended['whole']} whole, {ended['error']} with an error"


def main():
    one = Servers(args.bin, 1)
    try:
        wanted = hit_rate(one)
    finally:
        one.stop()
    policies = POLICIES[args.router]
    for policy in policies[:1] if args.short else policies:
        servers = Servers(args.bin, 2, args.router, policy)
        name = f"{args.router} {policy}"
        try:
            got = hit_rate(servers)
            print(f"ok  {name}: {got:.2f} of the prompt tokens cached, one server {wanted:.2f}")
            assert got >= 0.9 * wanted, (got, wanted)
            if policy == "kv_aware":
                hits = events_lead_the_router(servers)
                print(f"ok  {name}: {hits} of 12 prompts went where events said")
                assert hits >= 11, hits
            keys_and_refusals_pass(servers)
            print(f"ok  {name}: keys and refusals pass")
            print(f"ok  {name}: a killed server: {a_killed_server_hangs_nobody(servers)}")
        except BaseException:
            if servers.router:
                print(servers.router.log.read_text()[-4000:], file=sys.stderr)
            raise
        finally:
            servers.stop()


main()
