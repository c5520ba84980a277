"""Checks calls of tools through the OpenAI SDK against a running server of the demo model.

The demo model has not learnt to call tools. So the checks demand calls, which a grammar then
guarantees, and look at their form. Prints one line per check.
"""

import argparse
import json

import openai
from openai import OpenAI

flags = argparse.ArgumentParser(description=__doc__)
flags.add_argument("--url", required=True, help="the server, without /v1")
args = flags.parse_args()
client = OpenAI(base_url=args.url + "/v1", api_key="none", max_retries=0, timeout=120)

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time", "description": "The time."}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]


def chat(messages=QUESTION, **options):
    options = {"tools": [WEATHER, TIME], "temperature": 0, "max_tokens": 200, **options}
    return client.chat.completions.create(model="default", messages=messages, **options)


def check_call(call):
    """Checks a call of one of the tools."""
    assert call.id and call.type == "function", call
    arguments = json.loads(call.function.arguments)
    if call.function.name == "get_time":
        assert arguments == {}, call
    else:
        assert call.function.name == "get_weather", call
        assert arguments["city"] in ("Paris", "Rome") and 1 <= arguments["days"] <= 9, call
        assert set(arguments) == {"city", "days"}, call


def required_and_named_tools_are_called():
    for choice in ("required", NAMED):
        answer = chat(tool_choice=choice, parallel_tool_calls=False).choices[0]
        assert answer.finish_reason == "tool_calls" and answer.message.content is None, answer
        (call,) = answer.message.tool_calls
        check_call(call)
        assert choice == "required" or call.function.name == "get_weather", call


def streamed_calls_equal_whole_ones():
    whole = chat(tool_choice=NAMED).choices[0].message.tool_calls[0].function
    calls, reason = {}, None
    for chunk in chat(tool_choice=NAMED, stream=True):
        (choice,) = chunk.choices
        reason = choice.finish_reason or reason
        for delta in choice.delta.tool_calls or []:
            if delta.id:
                assert delta.index not in calls and delta.function.arguments == "", delta
                calls[delta.index] = [delta.function.name, ""]
            else:
                calls[delta.index][1] += delta.function.arguments
    assert calls == {0: [whole.name, whole.arguments]} and reason == "tool_calls", calls
    with client.chat.completions.stream(
        model="default", messages=QUESTION, tools=[WEATHER], tool_choice=NAMED, temperature=0
    ) as stream:
        final = stream.get_final_completion().choices[0].message.tool_calls[0]
    check_call(final)


def results_are_read_in_the_next_request():
    message = chat(tool_choice=NAMED).choices[0].message
    result = {
        "role": "tool",
        "tool_call_id": message.tool_calls[0].id,
        "content": json.dumps({"sky": "blue"}),
    }
    messages = [*QUESTION, message, result]
    answer = chat(messages, tool_choice="none").choices[0]
    assert answer.finish_reason in ("stop", "length") and not answer.message.tool_calls, answer
    alone = chat(QUESTION, tool_choice="none").usage.prompt_tokens
    assert chat(messages, tool_choice="none").usage.prompt_tokens > alone + 20


def a_free_answer_is_text_or_a_call():
    answer = chat(tool_choice="auto").choices[0]
    for call in answer.message.tool_calls or []:
        if answer.finish_reason == "tool_calls":
            check_call(call)
    assert answer.message.content or answer.message.tool_calls, answer


def errors_name_the_field():
    bad = {"type": "function", "function": {"name": "no spaces"}}
    try:
        chat(tools=[TIME, bad])
    except openai.BadRequestError as error:
        assert error.param == "tools[1].function.name", error.body
    else:
        raise AssertionError("a bad name was accepted")


for check in (
    required_and_named_tools_are_called,
    streamed_calls_equal_whole_ones,
    results_are_read_in_the_next_request,
    a_free_answer_is_text_or_a_call,
    errors_name_the_field,
):
    check()
    print("ok  ", check.__name__.replace("_", " "))
