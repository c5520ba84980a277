"""Checks a running server of the demo model through Anthropic's SDK. Prints one line per check."""

import argparse

import anthropic
from anthropic import Anthropic

flags = argparse.ArgumentParser(description=__doc__)
flags.add_argument("--url", required=True, help="the server, without /v1")
args = flags.parse_args()
client = Anthropic(base_url=args.url, api_key="none", max_retries=0, timeout=120)

TOOL = {
    "name": "get_weather",
    "description": "Weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
    },
}
CHOICE = {"type": "tool", "name": "get_weather"}
QUESTION = {"role": "user", "content": "What is the capital of France?"}


def options(**more):
    # The SDK has no argument for the temperature any more.
    greedy = {"extra_body": {"temperature": 0}}
    return {"model": "default", "max_tokens": 100, "messages": [QUESTION], **greedy, **more}


def messages_have_text_and_usage():
    message = client.messages.create(**options())
    assert message.type == "message" and message.role == "assistant", message
    assert "Paris" in message.content[0].text and message.stop_reason == "end_turn", message
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens > 5, usage
    assert usage.output_tokens > 1 and message._request_id, message
    stopped = client.messages.create(**options(stop_sequences=["Paris"]))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Paris"), stopped
    cut = client.messages.create(**options(max_tokens=1))
    assert cut.stop_reason == "max_tokens", cut


def streams_equal_whole_messages():
    whole = client.messages.create(**options())
    with client.messages.stream(**options()) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text, text
    assert final.usage.output_tokens == whole.usage.output_tokens, final
    events = [event.type for event in client.messages.create(**options(), stream=True)]
    assert events[0] == "message_start" and events[-2:] == ["message_delta", "message_stop"], events


def tools_are_called_and_their_results_read():
    with_tool = options(tools=[TOOL], tool_choice=CHOICE)
    message = client.messages.create(**with_tool)
    (call,) = message.content
    assert message.stop_reason == "tool_use" and call.type == "tool_use", message
    assert call.name == "get_weather" and call.input["city"] in ("Paris", "Rome"), call
    with client.messages.stream(**with_tool) as stream:
        (streamed,) = stream.get_final_message().content
    assert (streamed.name, streamed.input) == (call.name, call.input), streamed
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    messages = [
        QUESTION,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    answer = client.messages.create(**options(messages=messages, tools=[TOOL]))
    assert answer.stop_reason in ("end_turn", "max_tokens", "tool_use"), answer


def tokens_are_counted():
    count = client.messages.count_tokens(model="default", messages=[QUESTION]).input_tokens
    usage = client.messages.create(**options()).usage
    assert count == usage.input_tokens + usage.cache_read_input_tokens, (count, usage)


def errors_have_their_types():
    for more, kind in (
        ({"model": "claude-none"}, anthropic.NotFoundError),
        ({"max_tokens": 0}, anthropic.BadRequestError),
        ({"messages": []}, anthropic.BadRequestError),
    ):
        try:
            client.messages.create(**options(**more))
        except kind as error:
            assert error.body["type"] == "error" and error.body["error"]["message"], error.body
            assert error.request_id, error
        else:
            raise AssertionError(f"no {kind.__name__}")


for check in (
    messages_have_text_and_usage,
    streams_equal_whole_messages,
    tools_are_called_and_their_results_read,
    tokens_are_counted,
    errors_have_their_types,
):
    check()
    print("ok  ", check.__name__.replace("_", " "))
