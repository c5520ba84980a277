"""Sends the requests that Open WebUI sends to a server of OpenAI's API, and reads the answers as
Open WebUI does. Prints one line per check, then the totals.

The requests follow Open WebUI 0.12.4 (`open_webui/routers/openai.py`, `routers/tasks.py`,
`utils/headers.py` and `utils/middleware.py`), in our own words: Open WebUI itself has 5 GB of
packages. It sends them with aiohttp, and so does this script.

- The list of models, for the menu and when an administrator tests the connection.
- A chat: a stream, with the system prompt first. `stream_options` asks for the usage. The settings
  of a model or a chat are added only if a person has set them: numbers as floats, tokens as
  integers, `stop` as a list, and fields that Open WebUI does not know as they were typed.
- Three tasks after the first answer: a title, tags and follow-up questions. Each is one message of
  a user that holds the conversation, without a stream, and the answer should be JSON. A title has
  the `max_tokens` of the model's settings, or else 1000. The server gets none of Open WebUI's own
  fields, such as `metadata`.
- A tool: the call and its result go back as messages, the content of the call empty.
- Each request has a key only if the connection has one. With `ENABLE_FORWARD_USER_INFO_HEADERS`,
  headers name the user and the chat.
"""

import argparse
import asyncio
import json
import sys
import traceback

import aiohttp

flags = argparse.ArgumentParser(description=__doc__)
flags.add_argument("--url", required=True, help="server of the demo model, without /v1")
args = flags.parse_args()
URL = args.url + "/v1"

JSON = {"Content-Type": "application/json"}
KEY = {"Authorization": "Bearer sk-none"}
USER = {
    "X-OpenWebUI-User-Name": "Zo%C3%AB Doe",
    "X-OpenWebUI-User-Id": "5f0c6e2e-7d0b-4a55-9a41-3a1f5f0f7d11",
    "X-OpenWebUI-User-Email": "zoe@example.com",
    "X-OpenWebUI-User-Role": "user",
    "X-OpenWebUI-Chat-Id": "0f9f3c1a-6f64-4a68-8f0f-54a7f0f3f2c9",
}
QUESTION = "What is the capital of France?"
SYSTEM = {"role": "system", "content": "You answer Zoë in one sentence."}
# What a person can set for a model or a chat, as Open WebUI converts it.
SETTINGS = {
    "temperature": 0.0,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.0,
    "max_tokens": 24,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "seed": 7,
    "stop": ["###", "\n\n\n"],
    "logit_bias": {"5": -100},
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["place"],
        },
    },
}


def task(wanted, example):
    """Returns the message of a task about a short conversation."""
    return {
        "role": "user",
        "content": f"### Task:\n{wanted}\n### Output:\nOnly a JSON object: {json.dumps(example)}\n"
        f"### Chat History:\n<chat_history>\nUSER: {QUESTION}\nASSISTANT: Paris.\n</chat_history>",
    }


TASKS = {
    "title": (task("Find a title of 2 to 4 words.", {"title": "..."}), {"max_tokens": 24}),
    "tags": (task("Find 1 to 3 broad tags.", {"tags": ["...", "..."]}), {}),
    "follow-ups": (task("Suggest 3 to 5 next messages.", {"follow_ups": ["...", "..."]}), {}),
}


async def models(session, headers):
    async with session.get(f"{URL}/models", headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        return [model["id"] for model in (await answer.json())["data"]]


async def post(session, body, headers):
    """Returns the status and the JSON of an answer that is no stream."""
    data = json.dumps(body)
    async with session.post(f"{URL}/chat/completions", data=data, headers=headers) as answer:
        assert "text/event-stream" not in answer.headers["Content-Type"]
        return answer.status, await answer.json()


class Answer:
    """What Open WebUI takes from a stream: each line by itself, whatever the chunks are."""

    def __init__(self):
        self.text, self.calls, self.usage, self.finish, self.done = "", {}, None, None, False

    async def read(self, response):
        async for line in response.content:
            line = line.decode().strip()
            if line == "data: [DONE]":
                self.done = True
            elif line.startswith("data:"):
                self.add(json.loads(line[len("data:") :]))
        return self

    def add(self, chunk):
        assert "error" not in chunk, chunk
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            self.finish = choice.get("finish_reason") or self.finish
            delta = choice["delta"]
            self.text += delta.get("content") or ""
            for part in delta.get("tool_calls") or []:
                call = self.calls.setdefault(part["index"], {"id": None, "name": "", "text": ""})
                call["id"] = part.get("id") or call["id"]
                call["name"] += part["function"].get("name") or ""
                call["text"] += part["function"].get("arguments") or ""


async def stream(session, body, headers):
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
    async with session.post(f"{URL}/chat/completions", data=data, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        assert answer.headers["Content-Type"].startswith("text/event-stream"), answer.headers
        return await Answer().read(answer)


async def the_menu_lists_the_model(session):
    plain = await models(session, JSON)
    assert plain and plain == await models(session, JSON | KEY | USER), plain
    return plain[0]


async def a_chat_streams_with_its_usage(session):
    model = await the_menu_lists_the_model(session)
    body = {"model": model, "messages": [{"role": "user", "content": QUESTION}]}
    for headers in [JSON, JSON | KEY, JSON | KEY | USER]:
        answer = await stream(session, {**body, "temperature": 0.0}, headers)
        assert "Paris" in answer.text and answer.done and answer.finish == "stop", vars(answer)
        assert answer.usage["completion_tokens"] > 0 < answer.usage["prompt_tokens"]
        total = answer.usage["completion_tokens"] + answer.usage["prompt_tokens"]
        assert answer.usage["total_tokens"] == total, answer.usage


async def settings_and_the_system_prompt_are_taken(session):
    model = await the_menu_lists_the_model(session)
    first = [SYSTEM, {"role": "user", "content": QUESTION}]
    short = {"model": model, "messages": first, **SETTINGS}
    answer = await stream(session, short, JSON | KEY)
    assert answer.done and 0 < answer.usage["completion_tokens"] <= 24, vars(answer)
    again = await stream(session, short, JSON | KEY)
    assert again.text == answer.text, (again.text, answer.text)
    # The next turn repeats the conversation. Its prompt is longer.
    talk = [*first, {"role": "assistant", "content": answer.text}, first[1]]
    second = await stream(session, {**short, "messages": talk}, JSON | KEY)
    assert second.usage["prompt_tokens"] > answer.usage["prompt_tokens"], vars(second)


async def the_tasks_after_an_answer_complete(session):
    model = await the_menu_lists_the_model(session)
    for name, (message, settings) in TASKS.items():
        request = {"model": model, "messages": [message], "stream": False, **settings}
        status, answer = await post(session, request, JSON | KEY)
        assert status == 200, (name, answer)
        # The demo model is too small for these tasks: what it says is not judged.
        assert isinstance(answer["choices"][0]["message"]["content"], str), (name, answer)
        assert answer["usage"]["completion_tokens"] > 0, (name, answer)


async def what_the_server_refuses_says_what_to_do(session):
    """The demo has 1024 tokens of context, and a title without settings wants 1000 of them."""
    model = await the_menu_lists_the_model(session)
    title = {"model": model, "messages": [TASKS["title"][0]], "stream": False}
    status, answer = await post(session, {**title, "max_tokens": 1000}, JSON | KEY)
    assert status == 400 and "reduce 'max_tokens'" in answer["error"]["message"], answer
    # Open WebUI has a setting with Ollama's name, and sends the name to all servers.
    status, answer = await post(session, {**title, "repeat_penalty": 1.1}, JSON | KEY)
    assert status == 400 and "'repetition_penalty'" in answer["error"]["message"], answer


async def a_tool_is_called_and_its_result_read(session):
    model = await the_menu_lists_the_model(session)
    question = {"role": "user", "content": "What is the weather in Paris?"}
    body = {"model": model, "messages": [question], "tools": [WEATHER], "temperature": 0.0}
    forced = {"type": "function", "function": {"name": "get_weather"}}
    answer = await stream(session, {**body, "tool_choice": forced, "max_tokens": 200}, JSON | KEY)
    call = answer.calls[0]
    assert call["id"] and call["name"] == "get_weather", answer.calls
    function = {"name": call["name"], "arguments": call["text"]}
    said = {"id": call["id"], "type": "function", "index": 0, "function": function}
    talk = [
        question,
        {"role": "assistant", "content": "", "tool_calls": [said]},
        {"role": "tool", "tool_call_id": call["id"], "content": '{"sky": "clear"}'},
    ]
    after = await stream(session, {**body, "messages": talk, "max_tokens": 24}, JSON | KEY)
    assert after.done and after.usage["prompt_tokens"] > answer.usage["prompt_tokens"]


async def an_error_is_json_that_names_its_cause(session):
    body = {"model": "default", "messages": [{"role": "user", "content": QUESTION}]}
    for stream_it in [False, True]:
        request = {**body, "temperature": 9.0, "stream": stream_it}
        status, answer = await post(session, request, JSON | KEY)
        assert status == 400 and "'temperature'" in answer["error"]["message"], answer
    status, answer = await post(session, {**body, "model": "gone", "stream": True}, JSON | KEY)
    assert status == 404 and "gone" in answer["error"]["message"], answer


async def a_chat_that_is_stopped_leaves_the_server_free(session):
    model = await the_menu_lists_the_model(session)
    body = {"model": model, "messages": [{"role": "user", "content": "Tell me a story."}]}
    data = json.dumps({**body, "stream": True, "ignore_eos": True, "max_tokens": 100})
    async with session.post(f"{URL}/chat/completions", data=data, headers=JSON | KEY) as answer:
        assert (await answer.content.readline()).startswith(b"data:")
        answer.close()  # As when a person presses Stop.
    await a_chat_streams_with_its_usage(session)


CHECKS = [
    the_menu_lists_the_model,
    a_chat_streams_with_its_usage,
    settings_and_the_system_prompt_are_taken,
    the_tasks_after_an_answer_complete,
    what_the_server_refuses_says_what_to_do,
    a_tool_is_called_and_its_result_read,
    an_error_is_json_that_names_its_cause,
    a_chat_that_is_stopped_leaves_the_server_free,
]


async def main():
    failures = 0
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        for check in CHECKS:
            name = check.__name__.replace("_", " ")
            try:
                await check(session)
                print(f"ok   {name}", flush=True)
            except Exception:
                failures += 1
                print(f"FAIL {name}\n{traceback.format_exc()}", flush=True)
    print(f"Open WebUI: {len(CHECKS) - failures} passed, {failures} failed")
    sys.exit(failures > 0)


if __name__ == "__main__":
    asyncio.run(main())
