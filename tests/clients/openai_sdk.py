"""Checks a running server through the OpenAI SDK. Prints one line per check, then the totals.

Needs two servers of the demo model: one with the default limits, and a tiny server that runs one
request and queues one. The last check sends SIGTERM to the tiny server. All random choices come
from --seed.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import signal
import sys
import time
import traceback
from collections import Counter

import httpx
import openai
from openai import AsyncOpenAI, OpenAI

PAGE_TOKENS = 16
QUESTIONS = [
    "What is the capital of France?",
    "What is paging?",
    "What is the opposite of hot?",
    "Who are you?",
    "What is two plus three?",
    "Tell me a story.",
    "What colour is the sky?",
    "Count from one to nine.",
    "How do you spell bird?",
    "Which day comes after Monday?",
]

flags = argparse.ArgumentParser(description=__doc__)
flags.add_argument("--url", required=True, help="server with the default limits, without /v1")
flags.add_argument(
    "--tiny-url", required=True, help="server started with --max-running 1 --max-queued 1"
)
flags.add_argument("--tiny-pid", required=True, type=int)
flags.add_argument("--seed", type=int, default=1)
args = flags.parse_args()

client = OpenAI(base_url=args.url + "/v1", api_key="none", max_retries=0, timeout=60)
http = httpx.Client(base_url=args.url, timeout=60, trust_env=False)
checks = []


def check(function):
    """Adds a check. The output shows the function's name as words."""
    checks.append(function)
    return function


# ---------------------------------------------------------------- sending requests


def chat(messages, client=client, **options):
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return client.chat.completions.create(
        **{"model": "default", "messages": messages, "temperature": 0, **options}
    )


def complete(prompt, **options):
    return client.completions.create(
        **{"model": "default", "prompt": prompt, "temperature": 0, **options}
    )


def exactly(tokens, **extra):
    """Returns options for an answer of exactly `tokens` tokens."""
    return {
        "max_tokens": tokens,
        "extra_body": {"ignore_eos": True, "return_token_ids": True, **extra},
    }


def expect_error(kind, call):
    """Returns the error that `call` raises. It must be a `kind` and have OpenAI's shape."""
    try:
        call()
    except openai.APIStatusError as error:
        assert isinstance(error, kind), (
            f"{type(error).__name__} instead of {kind.__name__}: {error}"
        )
        assert (
            isinstance(error.body, dict)
            and {"message", "type", "param", "code"} <= error.body.keys()
        ), error.body
        assert isinstance(error.code, str) and error.body["message"], error.body
        return error
    raise AssertionError(f"no {kind.__name__}")


def metric(name, http=http, **labels):
    """Returns the sum of all series of `name` with these labels. There must be one."""
    text = http.get("/metrics").raise_for_status().text
    values = []
    for line in text.splitlines():
        series = re.fullmatch(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)", line)
        if series and series[1] == name:
            found = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', series[2] or ""))
            if all(found.get(label) == value for label, value in labels.items()):
                values.append(float(series[3]))
    assert values, f"/metrics has no {name} {labels}"
    return sum(values)


def wait_while(wrong, seconds=20):
    """Polls `wrong` until it returns a false value. A failure shows its last value."""
    deadline = time.monotonic() + seconds
    while found := wrong():
        assert time.monotonic() < deadline, f"{wrong.__name__} still after {seconds} s: {found}"
        time.sleep(0.05)


# ---------------------------------------------------------------- models, health and metrics


@check
def models_are_listed_and_retrieved():
    models = client.models.list().data
    assert models, "no model"
    model = client.models.retrieve(models[0].id)
    assert model.id == models[0].id and model.object == "model", model
    assert model.max_model_len >= 128, model
    error = expect_error(openai.NotFoundError, lambda: client.models.retrieve("no-such-model"))
    assert error.code == "model_not_found", error.body


@check
def health_ready_and_metrics_answer():
    assert http.get("/health").status_code == 200
    assert http.get("/ready").status_code == 200
    assert metric("sterna_build_info") == 1
    assert metric("vllm:num_requests_running") == 0


# ---------------------------------------------------------------- chat


@check
def chat_answers():
    answer = chat("What is the capital of France?")
    choice = answer.choices[0]
    assert answer.object == "chat.completion" and len(answer.choices) == 1, answer
    assert choice.message.role == "assistant" and "Paris" in choice.message.content, choice
    assert choice.finish_reason == "stop", choice
    usage = answer.usage
    assert usage.prompt_tokens > 0 and usage.completion_tokens > 0, usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage


@check
def a_chat_of_three_turns_works():
    messages = []
    for question, expected in [
        ("Hello!", ""),
        ("What is the capital of France?", "Paris"),
        ("And of Spain?", "Madrid"),
    ]:
        messages.append({"role": "user", "content": question})
        choice = chat(messages, max_tokens=100).choices[0]
        text = choice.message.content
        assert expected in text and text.strip() and text.isprintable(), (question, text)
        assert choice.finish_reason == "stop", (question, choice)
        messages.append({"role": "assistant", "content": text})


@check
def streamed_chat_is_the_same_text():
    for options in [
        {"temperature": 0},
        {"temperature": 1, "seed": 7},
        {"temperature": 0.7, "seed": 3, "top_p": 0.9},
    ]:
        for question in QUESTIONS[:4]:
            whole = chat(question, max_tokens=60, **options)
            chunks = list(
                chat(
                    question,
                    max_tokens=60,
                    stream=True,
                    stream_options={"include_usage": True},
                    **options,
                )
            )
            *pieces, last = chunks
            assert (
                last.choices == [] and last.usage.completion_tokens == whole.usage.completion_tokens
            ), last
            assert (
                pieces[0].choices[0].delta.role == "assistant"
                and not pieces[0].choices[0].delta.content
            ), pieces[0]
            text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
            assert text == whole.choices[0].message.content, (text, whole)
            reasons = [
                piece.choices[0].finish_reason for piece in pieces if piece.choices[0].finish_reason
            ]
            assert reasons == [whole.choices[0].finish_reason], reasons
            assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


@check
def stream_frames_are_as_documented():
    body = {
        "messages": [{"role": "user", "content": QUESTIONS[0]}],
        "max_tokens": 5,
        "stream": True,
    }
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.headers
    assert answer.headers["cache-control"] == "no-cache", answer.headers
    frames = answer.text.split("\n\n")
    assert (
        frames.pop() == "" and frames[-1] == "data: [DONE]" and frames.count("data: [DONE]") == 1
    ), answer.text
    for frame in frames[:-1]:
        if not frame.startswith(":"):
            assert (
                "\n" not in frame
                and json.loads(frame.removeprefix("data: "))["object"] == "chat.completion.chunk"
            )


@check
def usage_counts_cached_tokens():
    prompt = f"Seed {random.Random(args.seed).random()}. " + " ".join(QUESTIONS)
    cold, warm = chat(prompt, max_tokens=4).usage, chat(prompt, max_tokens=4).usage
    assert cold.prompt_tokens == warm.prompt_tokens > 3 * PAGE_TOKENS, (cold, warm)
    cold_tokens, warm_tokens = (
        cold.prompt_tokens_details.cached_tokens,
        warm.prompt_tokens_details.cached_tokens,
    )
    assert 0 <= cold_tokens < warm_tokens < warm.prompt_tokens, (cold, warm)
    # The server computes the last token again, because the answer needs its logits.
    assert warm_tokens == warm.prompt_tokens - 1, warm
    *_, last = chat(prompt, max_tokens=4, stream=True, stream_options={"include_usage": True})
    assert last.usage.prompt_tokens_details.cached_tokens == warm_tokens, last


@check
def stop_strings_end_the_text_and_are_not_part_of_it():
    full = chat("Count from one to nine.", max_tokens=60).choices[0].message.content
    assert len(full) > 12, full
    rng = random.Random(args.seed)
    for _ in range(6):
        start = rng.randrange(1, len(full) - 4)
        stop = full[start : start + rng.randrange(1, 5)]
        expected = full[: full.index(stop)]
        choice = chat("Count from one to nine.", max_tokens=60, stop=[stop, "never said"]).choices[
            0
        ]
        assert (choice.message.content, choice.finish_reason) == (expected, "stop"), (stop, choice)
        chunks = chat("Count from one to nine.", max_tokens=60, stop=stop, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected, stop


@check
def chat_logprobs():
    answer = chat(QUESTIONS[0], logprobs=True, top_logprobs=3, **exactly(12)).choices[0]
    entries = answer.logprobs.content
    assert len(entries) == 12 == len(answer.token_ids) and answer.finish_reason == "length", answer
    for entry in entries:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 3, entry
        top = [other.logprob for other in entry.top_logprobs]
        assert top == sorted(top, reverse=True), entry
        assert (entry.top_logprobs[0].token, top[0]) == (entry.token, entry.logprob), (
            entry
        )  # Greedy.
        assert entry.bytes == list(entry.token.encode()) or "\ufffd" in entry.token, entry
    streamed = []
    for chunk in chat(QUESTIONS[0], logprobs=True, top_logprobs=3, stream=True, **exactly(12)):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content
    assert streamed == entries, "streamed logprobs differ"
    assert chat(QUESTIONS[0], max_tokens=2).choices[0].logprobs is None


# ---------------------------------------------------------------- completions


@check
def completions_take_every_form_of_prompt():
    prompt = "The capital of France is"
    text = complete(prompt, **exactly(8))
    assert text.object == "text_completion" and text.choices[0].finish_reason == "length", text
    assert len(text.choices[0].token_ids) == 8 == text.usage.completion_tokens, text
    assert complete([prompt], **exactly(8)).choices[0].token_ids == text.choices[0].token_ids
    ids = list(text.choices[0].token_ids)
    one, other = complete(ids, **exactly(8)), complete([ids], **exactly(8))
    assert one.usage.prompt_tokens == other.usage.prompt_tokens == len(ids), (one, other)
    assert one.choices[0].token_ids == other.choices[0].token_ids
    streamed = complete(prompt, stream=True, **exactly(8))
    assert (
        "".join(chunk.choices[0].text for chunk in streamed if chunk.choices)
        == text.choices[0].text
    )


@check
def completions_logprobs():
    logprobs = complete("The capital of France is", logprobs=2, **exactly(8)).choices[0].logprobs
    lengths = {
        len(column)
        for column in (
            logprobs.tokens,
            logprobs.token_logprobs,
            logprobs.top_logprobs,
            logprobs.text_offset,
        )
    }
    assert lengths == {8}, logprobs
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs):
        assert logprob <= 0 and 1 <= len(top) <= 3 and top[token] == logprob == max(top.values()), (
            token,
            logprob,
            top,
        )
    assert logprobs.text_offset == sorted(logprobs.text_offset), logprobs


@check
def equal_seeds_give_equal_answers():
    def say(seed):
        return (
            chat("Tell me a story.", temperature=1.5, seed=seed, **exactly(24)).choices[0].token_ids
        )

    assert say(1) == say(1)
    assert len({tuple(say(seed)) for seed in range(4)}) > 1


@check
def choice_i_is_the_answer_of_seed_plus_i():
    def pieces(choice):
        return choice.delta.content or "" if hasattr(choice, "delta") else choice.text

    for ask, question in [(chat, "Tell me a story."), (complete, "The capital of France is")]:
        options = {"temperature": 1.5, **exactly(24)}
        whole = ask(question, n=3, seed=5, **options)
        assert [choice.index for choice in whole.choices] == [0, 1, 2], whole
        alone = [ask(question, seed=5 + index, **options) for index in range(3)]
        assert [choice.token_ids for choice in whole.choices] == [
            one.choices[0].token_ids for one in alone
        ], whole
        assert len({tuple(choice.token_ids) for choice in whole.choices}) > 1, whole
        usage = whole.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (
            alone[0].usage.prompt_tokens,
            3 * 24,
        ), usage

        *chunks, last = ask(
            question, n=3, seed=5, stream=True, stream_options={"include_usage": True}, **options
        )
        assert last.choices == [] and last.usage.completion_tokens == 3 * 24, last
        assert last.usage.prompt_tokens == usage.prompt_tokens, last
        for index, choice in enumerate(whole.choices):
            mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
            text = choice.message.content if ask is chat else choice.text
            assert "".join(map(pieces, mine)) == text, (index, text)
            assert [piece.finish_reason for piece in mine if piece.finish_reason] == ["length"], (
                mine
            )
            assert ask is complete or mine[0].delta.role == "assistant", mine[0]


# ---------------------------------------------------------------- errors


@check
def errors_name_the_wrong_field():
    for options, param in [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"n": 9}, "n"),
        ({"extra_body": {"best_of": 2}}, "best_of"),
        ({"max_tokens": -3}, "max_tokens"),
        ({"top_logprobs": 99, "logprobs": True}, "top_logprobs"),
        ({"extra_body": {"tools": [{"type": "function"}]}}, "tools[0].function"),
        ({"messages": []}, "messages"),
    ]:
        error = expect_error(
            openai.BadRequestError, lambda: chat(options.pop("messages", "Hello!"), **options)
        )
        assert error.type == "invalid_request_error" and error.param == param, (options, error.body)
        assert error.code in ("invalid_value", "unsupported_parameter"), error.body
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    error = expect_error(openai.BadRequestError, lambda: chat([{"role": "user", "content": image}]))
    assert error.param and error.param.startswith("messages"), error.body
    error = expect_error(openai.BadRequestError, lambda: complete(["one", 2]))
    assert error.param and error.param.startswith("prompt"), error.body


@check
def several_prompts_are_several_choices():
    prompts = ["The capital of France", "Once upon a time", "Paging"]
    together = complete(prompts, **exactly(8)).choices
    alone = [complete(prompt, **exactly(8)).choices[0] for prompt in prompts]
    assert [choice.index for choice in together] == [0, 1, 2]
    assert [choice.text for choice in together] == [choice.text for choice in alone]


@check
def answers_follow_a_json_schema():
    schema = {
        "type": "object",
        "properties": {
            "city": {"enum": ["Paris", "Rome"]},
            "large": {"type": "boolean"},
            "number": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["city", "large", "number"],
        "additionalProperties": False,
    }
    named = {"name": "place", "strict": True, "schema": schema}
    answer = chat(
        "Name a city.", response_format={"type": "json_schema", "json_schema": named}
    ).choices[0]
    place = json.loads(answer.message.content)
    assert answer.finish_reason == "stop", answer
    assert set(place) == {"city", "large", "number"} and place["city"] in ("Paris", "Rome"), place
    assert isinstance(place["large"], bool) and 0 <= place["number"] <= 99, place


@check
def null_means_absent_and_unknown_fields_are_ignored():
    extra = {
        "tools": None,
        "stop": None,
        "top_k": None,
        "n": None,
        "seed": None,
        "x_router_hint": {"a": 1},
    }
    assert (
        chat(QUESTIONS[0], extra_body=extra).choices[0].message.content
        == chat(QUESTIONS[0]).choices[0].message.content
    )


@check
def wrong_models_and_routes_are_not_found():
    error = expect_error(openai.NotFoundError, lambda: chat("Hello!", model="gpt-none"))
    assert (error.type, error.code) == ("invalid_request_error", "model_not_found"), error.body
    assert "error" in http.get("/v1/nothing").json() and http.get("/v1/nothing").status_code == 404
    answer = http.get("/v1/chat/completions")
    assert answer.status_code == 405 and "error" in answer.json(), answer.text


@check
def invalid_json_is_rejected():
    answer = http.post(
        "/v1/chat/completions",
        content=b'{"messages": [',
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json", (
        answer.text
    )


@check
def too_long_prompts_are_rejected():
    limit = client.models.list().data[0].max_model_len
    error = expect_error(openai.BadRequestError, lambda: complete([5] * (limit + 1), max_tokens=1))
    assert error.code == "context_length_exceeded", error.body


@check
def responses_have_request_ids():
    raw = client.chat.completions.with_raw_response
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "Hello!"}],
        "max_tokens": 1,
    }
    assert raw.create(**body).headers["x-request-id"]
    assert (
        raw.create(**body, extra_headers={"x-request-id": "mine-1"}).headers["x-request-id"]
        == "mine-1"
    )


# ---------------------------------------------------------------- many requests at once


def mixed_requests(count, rng):
    """Returns chats and completions, greedy and sampled, of various fixed output lengths."""
    limit = client.models.list().data[0].max_model_len
    requests = []
    for index in range(count):
        answer_tokens = rng.randrange(4, 65)
        sampling = (
            {"temperature": 0}
            if rng.random() < 0.3
            else {"temperature": rng.uniform(0.5, 1.5), "seed": index, "top_p": 0.95}
        )
        question = " ".join(rng.choice(QUESTIONS) for _ in range(rng.randrange(1, 9)))
        if index % 3 == 2:
            # Prompt and output fit the context, so the server rejects no request.
            prompt = [
                rng.randrange(10, 300)
                for _ in range(rng.randrange(1, min(200, limit - answer_tokens)))
            ]
            body = {"prompt": prompt, "logprobs": 2, **sampling, **exactly(answer_tokens)}
            requests.append(("completions", body))
        else:
            messages = [{"role": "user", "content": question}]
            body = {
                "messages": messages,
                "logprobs": True,
                "top_logprobs": 2,
                **sampling,
                **exactly(answer_tokens),
            }
            requests.append(("chat", body))
    return requests


async def send(sdk, request):
    """Returns what other requests must not change: text, token ids and logprobs, bit for bit."""
    kind, body = request
    endpoint = sdk.chat.completions if kind == "chat" else sdk.completions
    answer = await endpoint.create(model="default", **body)
    choice = answer.choices[0]
    text = choice.message.content if kind == "chat" else choice.text
    usage = (answer.usage.prompt_tokens, answer.usage.completion_tokens)
    return text, choice.token_ids, choice.logprobs.model_dump(), choice.finish_reason, usage


async def max_running(done):
    """Returns the maximum of running requests that /metrics reports until `done` is set."""
    maximum = 0
    while not done.is_set():
        running = await asyncio.to_thread(metric, "vllm:num_requests_running")
        maximum = max(maximum, running)
        await asyncio.sleep(0.005)
    return maximum


def async_client(url=args.url):
    return AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=120)


@check
def requests_give_the_same_bits_alone_and_together():
    requests = mixed_requests(48, random.Random(args.seed))

    async def together():
        done = asyncio.Event()
        async with async_client() as sdk:
            watcher = asyncio.create_task(max_running(done))
            answers = await asyncio.gather(*(send(sdk, request) for request in requests))
            done.set()
            return answers, await watcher

    async def alone():
        async with async_client() as sdk:
            return [await send(sdk, request) for request in requests]

    together_answers, maximum = asyncio.run(together())
    assert maximum >= 8, f"only {maximum} requests ran at the same time"
    for request, one, other in zip(requests, together_answers, asyncio.run(alone())):
        assert one[4][1] == request[1]["max_tokens"] == len(one[1]), (request, one)
        assert one == other, f"{request}\n together {one}\n alone    {other}"


@check
def clients_that_disconnect_leave_nothing_behind():
    before = metric("sterna_client_disconnects_total")
    pages = metric("sterna_kv_pages")
    rng = random.Random(args.seed)
    tokens = client.models.list().data[0].max_model_len - 100
    questions = [rng.choice(QUESTIONS) for _ in range(200)]

    def body(question):
        return {
            "model": "default",
            "messages": [{"role": "user", "content": question}],
            **exactly(tokens),
        }

    async def leave_stream(sdk, question, chunks):
        """Reads this many chunks of a stream. The server is at its answer then, however slow."""
        async with await sdk.chat.completions.create(**body(question), stream=True) as stream:
            async for _ in stream:
                chunks -= 1
                if chunks == 0:
                    return "left"
        return "read to the end"

    async def leave_answer(sdk, question, seconds):
        try:
            await asyncio.wait_for(sdk.chat.completions.create(**body(question)), seconds)
        except (asyncio.TimeoutError, openai.APITimeoutError):
            return "left early"
        return "read to the end"

    async def all_clients():
        async with async_client() as sdk:
            ends = [
                leave_stream(sdk, question, rng.randint(1, 10))
                if stream
                else leave_answer(sdk, question, rng.uniform(0.02, 1.5))
                for stream, question in zip(itertools.cycle([True, False]), questions)
            ]
            return Counter(await asyncio.gather(*ends))

    def still_in_use():
        """Returns the requests and pages that are still in use."""
        held = {
            "running": metric("vllm:num_requests_running"),
            "waiting": metric("vllm:num_requests_waiting"),
            "private": metric("sterna_kv_pages", state="private"),
            "pinned": metric("sterna_kv_pages", state="tree_pinned"),
        }
        return {name: value for name, value in held.items() if value}

    ends = asyncio.run(all_clients())
    assert ends["left"] == 100, ends
    wait_while(still_in_use)
    assert metric("sterna_kv_pages") == pages, "pages were lost"
    noticed = metric("sterna_client_disconnects_total") - before
    assert noticed >= ends["left"] // 2, f"{ends}, but the server noticed {noticed}"
    assert "Paris" in chat(QUESTIONS[0]).choices[0].message.content


# ---------------------------------------------------------------- overload and shutdown


@check
def a_full_queue_rejects_with_retry_after():
    tiny_http = httpx.Client(base_url=args.tiny_url, timeout=60, trust_env=False)

    async def ask(sdk):
        try:
            await chat_async(sdk)
            return "answered"
        except openai.InternalServerError as error:
            assert (error.status_code, error.type, error.code) == (
                503,
                "overloaded_error",
                "engine_overloaded",
            ), error.body
            assert int(error.response.headers["retry-after"]) >= 1, error.response.headers
            return "rejected"

    async def chat_async(sdk):
        messages = [{"role": "user", "content": "Tell me a story."}]
        return await sdk.chat.completions.create(model="default", messages=messages, **exactly(200))

    async def many_requests():
        async with async_client(args.tiny_url) as sdk:
            return Counter(await asyncio.gather(*(ask(sdk) for _ in range(16))))

    ends = asyncio.run(many_requests())
    assert ends["answered"] >= 1 and ends["rejected"] >= 1, ends

    def not_counted():
        return ends["rejected"] - metric("sterna_refusals_total", tiny_http, reason="queue_full")

    wait_while(not_counted, seconds=5)
    # The server accepts requests again as soon as it has capacity.
    tiny = OpenAI(base_url=args.tiny_url + "/v1", api_key="none", max_retries=0, timeout=60)
    assert "Paris" in chat(QUESTIONS[0], client=tiny).choices[0].message.content


@check
def sigterm_lets_a_stream_finish():
    tiny = OpenAI(base_url=args.tiny_url + "/v1", api_key="none", max_retries=0, timeout=60)
    chunks = chat(
        "Tell me a story.",
        client=tiny,
        stream=True,
        stream_options={"include_usage": True},
        **exactly(300),
    )
    pieces = [next(chunks) for _ in range(4)]
    os.kill(args.tiny_pid, signal.SIGTERM)

    def still_ready():
        try:
            return (
                httpx.get(args.tiny_url + "/ready", timeout=5, trust_env=False).status_code == 200
            )
        except httpx.TransportError:
            return False

    wait_while(still_ready, seconds=5)
    try:
        chat("Hello!", client=tiny)
        raise AssertionError("a draining server took a new request")
    except openai.InternalServerError as error:
        assert (error.status_code, error.code) == (503, "draining"), error.body
    except openai.APIConnectionError:
        pass
    pieces += chunks
    assert pieces[-1].usage and pieces[-1].usage.completion_tokens == 300, pieces[-1]
    assert [piece.choices[0].finish_reason for piece in pieces[:-1]][-1] == "length", pieces[-2]


def main():
    print(f"{args.url}, openai {openai.__version__}, seed {args.seed}")
    passed = failed = 0
    for function in checks:
        name = function.__name__.replace("_", " ")
        start = time.monotonic()
        try:
            function()
            passed += 1
            print(f"ok    {name} ({time.monotonic() - start:.1f} s)", flush=True)
        except Exception:
            failed += 1
            print(f"FAIL  {name}\n{traceback.format_exc()}", flush=True)
    print(f"{passed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
