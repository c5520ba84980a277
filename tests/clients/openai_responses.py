"""Checks responses through the OpenAI SDK against a running server of the demo model.

Prints one line per check.
"""

import argparse
import json

import openai
from openai import OpenAI

flags = argparse.ArgumentParser(description=__doc__)
flags.add_argument("--url", required=True, help="the server, without /v1")
args = flags.parse_args()
client = OpenAI(base_url=args.url + "/v1", api_key="none", max_retries=0, timeout=120)

QUESTION = "What is the capital of France?"
TOOL = {
    "type": "function",
    "name": "get_weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def create(**options):
    options = {"input": QUESTION, "temperature": 0, "max_output_tokens": 100, **options}
    return client.responses.create(model="default", **options)


def a_response_has_text():
    response = create()
    assert response.status == "completed" and "Paris" in response.output_text, response
    assert response.usage.total_tokens > response.usage.input_tokens > 0, response
    cut = create(max_output_tokens=1)
    assert cut.status == "incomplete", cut
    assert cut.incomplete_details.reason == "max_output_tokens", cut


def streams_equal_whole_responses():
    whole = create().output_text
    events = list(create(stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole and events[-1].type == "response.completed", events
    with client.responses.stream(
        model="default", input=QUESTION, temperature=0, max_output_tokens=100
    ) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == whole


def functions_are_called_and_their_outputs_read():
    choice = {"type": "function", "name": "get_weather"}
    (call,) = create(tools=[TOOL], tool_choice=choice).output
    assert call.type == "function_call" and call.name == "get_weather", call
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome"), call
    with client.responses.stream(
        model="default", input=QUESTION, tools=[TOOL], tool_choice=choice, temperature=0
    ) as stream:
        for _ in stream:
            pass
        (streamed,) = stream.get_final_response().output
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments), streamed
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    items = [{"role": "user", "content": QUESTION}, call.to_dict(), output]
    answer = create(input=items, tools=[TOOL], tool_choice="none")
    assert answer.status in ("completed", "incomplete") and answer.output_text, answer


def text_follows_a_schema():
    form = {"type": "json_schema", "name": "place", "schema": TOOL["parameters"], "strict": True}
    place = json.loads(create(text={"format": form}).output_text)
    assert place["city"] in ("Paris", "Rome"), place


def what_needs_state_is_refused():
    for more in ({"previous_response_id": "resp_1"}, {"background": True}):
        try:
            create(**more)
        except openai.BadRequestError as error:
            assert error.param == next(iter(more)), error.body
        else:
            raise AssertionError(f"{more} was accepted")
    assert create(store=True).store is False


for check in (
    a_response_has_text,
    streams_equal_whole_responses,
    functions_are_called_and_their_outputs_read,
    text_follows_a_schema,
    what_needs_state_is_refused,
):
    check()
    print("ok  ", check.__name__.replace("_", " "))
