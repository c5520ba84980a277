"""Checks a running server of the demo model through Python clients that build on its OpenAI API:
litellm, langchain-openai, pydantic-ai and llm. Prints one line per check, then the totals.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

flags = argparse.ArgumentParser(description=__doc__)
flags.add_argument("--url", required=True, help="server of the demo model, without /v1")
args = flags.parse_args()
base_url = args.url + "/v1"

# Before the imports, which read it.
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LLM_USER_PATH": tempfile.mkdtemp()}

import litellm  # noqa: E402
from langchain_openai import ChatOpenAI  # noqa: E402
from pydantic import BaseModel, Field  # noqa: E402
from pydantic_ai import Agent, NativeOutput  # noqa: E402
from pydantic_ai.models.openai import OpenAIChatModel  # noqa: E402
from pydantic_ai.providers.openai import OpenAIProvider  # noqa: E402

QUESTION = "What is the capital of France?"


class City(BaseModel):
    """What the structured answers hold."""

    name: str = Field(max_length=12)
    count: int = Field(ge=0, le=99)


def litellm_completes_and_streams():
    options = {
        "model": "openai/default",
        "api_base": base_url,
        "api_key": "none",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 24,
    }
    whole = litellm.completion(**options)
    text = whole.choices[0].message.content
    assert "Paris" in text, text
    assert whole.usage.completion_tokens > 0
    chunks = litellm.completion(**options, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == text, (streamed, text)
    try:
        litellm.completion(**{**options, "temperature": 9}, num_retries=0)
    except litellm.BadRequestError as error:
        assert "'temperature'" in str(error), error
    else:
        raise AssertionError("no error")


def langchain_answers_streams_and_follows_a_schema():
    model = ChatOpenAI(
        base_url=base_url, api_key="none", model="default", temperature=0, max_tokens=200
    )
    text = model.invoke(QUESTION).content
    assert "Paris" in text, text
    assert "".join(chunk.content for chunk in model.stream(QUESTION)) == text
    batch = model.batch([QUESTION, "Who are you?", QUESTION])
    assert batch[0].content == batch[2].content == text
    city = model.with_structured_output(City, method="json_schema").invoke(QUESTION)
    assert isinstance(city, City), city


def pydantic_ai_gets_a_model():
    provider = OpenAIProvider(base_url=base_url, api_key="none")
    model = OpenAIChatModel("default", provider=provider)
    settings = {"temperature": 0, "max_tokens": 200}
    agent = Agent(model, output_type=NativeOutput(City), model_settings=settings)
    assert isinstance(agent.run_sync(QUESTION).output, City)


def llm_prompts_from_the_command_line():
    models = Path(os.environ["LLM_USER_PATH"]) / "extra-openai-models.yaml"
    models.write_text(
        f"- model_id: demo\n  model_name: default\n  api_base: {base_url}\n  api_key_name: none\n"
    )
    program = Path(sys.executable).parent / "llm"
    command = [program, "-m", "demo", "--key", "none", "-o", "temperature", "0", "-n", QUESTION]
    for flags in [[], ["--no-stream"]]:
        answer = subprocess.run(command + flags, capture_output=True, text=True, check=True)
        assert "Paris" in answer.stdout, answer


CHECKS = [
    litellm_completes_and_streams,
    langchain_answers_streams_and_follows_a_schema,
    pydantic_ai_gets_a_model,
    llm_prompts_from_the_command_line,
]


def main():
    failures = 0
    for check in CHECKS:
        name = check.__name__.replace("_", " ")
        try:
            check()
            print(f"ok   {name}", flush=True)
        except Exception:
            failures += 1
            print(f"FAIL {name}\n{traceback.format_exc()}", flush=True)
    print(f"Python SDKs: {len(CHECKS) - failures} passed, {failures} failed")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
