"""Checks a running server of the demo model behind the proxy of litellm. Prints one line per check.

The script starts the proxy on a free port of the loopback address, and stops it.
"""

import argparse
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import openai
from openai import OpenAI

flags = argparse.ArgumentParser(description=__doc__)
flags.add_argument("--url", required=True, help="server of the demo model, without /v1")
args = flags.parse_args()

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
OPTIONS = {"messages": QUESTION, "temperature": 0, "max_tokens": 24}
START_SECONDS = 120
KEY = "sk-" + secrets.token_hex(32)  # The proxy starts only with a strong key.


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(folder, port):
    """Starts the proxy. Returns its process when it answers."""
    model = {"model": "openai/default", "api_base": args.url + "/v1", "api_key": "none"}
    # JSON is YAML too.
    config = {
        "model_list": [{"model_name": "tern", "litellm_params": model}],
        "litellm_settings": {"num_retries": 0},
    }
    path = Path(folder, "config.yaml")
    path.write_text(json.dumps(config))
    log = open(Path(folder, "proxy.log"), "w")
    program = Path(sys.executable).with_name("litellm")
    command = [program, "--config", path, "--host", "127.0.0.1", "--port", str(port)]
    environment = os.environ | {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_MASTER_KEY": KEY,
    }
    proxy = subprocess.Popen(
        [*command, "--telemetry", "False"], stdout=log, stderr=log, env=environment, cwd=folder
    )
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and proxy.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health/liveliness", timeout=5)
            return proxy
        except OSError:
            time.sleep(0.2)
    proxy.kill()
    raise SystemExit(f"the proxy does not start: {Path(log.name).read_text()[-2000:]}")


def answers_are_those_of_the_server(client):
    direct = OpenAI(base_url=args.url + "/v1", api_key="none", max_retries=0)
    wanted = direct.chat.completions.create(model="default", **OPTIONS)
    got = client.chat.completions.create(model="tern", **OPTIONS)
    assert got.choices[0].message.content == wanted.choices[0].message.content
    assert got.choices[0].finish_reason == wanted.choices[0].finish_reason
    assert got.usage.completion_tokens == wanted.usage.completion_tokens


def streams_have_the_same_text(client):
    whole = client.chat.completions.create(model="tern", **OPTIONS)
    usage = {"stream_options": {"include_usage": True}}
    parts, tokens = [], None
    for chunk in client.chat.completions.create(model="tern", stream=True, **usage, **OPTIONS):
        parts += [choice.delta.content or "" for choice in chunk.choices]
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
    assert "".join(parts) == whole.choices[0].message.content
    assert len(parts) > 2 and tokens == whole.usage.completion_tokens, (parts, tokens)


def tools_and_schemas_pass(client):
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}}
    schema |= {"required": ["city"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    answer = client.chat.completions.create(
        model="tern", tools=[tool], tool_choice="required", **{**OPTIONS, "max_tokens": 200}
    )
    for call in answer.choices[0].message.tool_calls:
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome"), call
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    answer = client.chat.completions.create(model="tern", response_format=form, **OPTIONS)
    assert json.loads(answer.choices[0].message.content)["city"] in ("Paris", "Rome")


def errors_keep_their_status_and_message(client):
    try:
        client.chat.completions.create(model="tern", **{**OPTIONS, "temperature": 9})
    except openai.BadRequestError as error:
        assert "'temperature'" in str(error), error
    else:
        raise AssertionError("no error")


with tempfile.TemporaryDirectory() as folder:
    port = free_port()
    proxy = start(folder, port)
    try:
        client = OpenAI(base_url=f"http://127.0.0.1:{port}", api_key=KEY, max_retries=0)
        for check in [
            answers_are_those_of_the_server,
            streams_have_the_same_text,
            tools_and_schemas_pass,
            errors_keep_their_status_and_message,
        ]:
            check(client)
            print(f"ok  {check.__name__}")
    finally:
        proxy.terminate()
        try:
            proxy.wait(20)
        except subprocess.TimeoutExpired:
            proxy.kill()
            proxy.wait()
