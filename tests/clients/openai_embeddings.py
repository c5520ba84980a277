"""Checks embeddings through the OpenAI SDK against a running server of a model that computes them.
Prints one line per check.
"""

import argparse
import math
from array import array

import openai
from openai import OpenAI

flags = argparse.ArgumentParser(description=__doc__)
flags.add_argument("--url", required=True, help="the server, without /v1")
args = flags.parse_args()
client = OpenAI(base_url=args.url + "/v1", api_key="none", max_retries=0, timeout=120)
model = client.models.list().data[0].id

TEXTS = ["The tern dives.", "A bird fishes.", "Interest rates rose again."]


def vectors(texts, **options):
    answer = client.embeddings.create(model=model, input=texts, **options)
    assert [item.index for item in answer.data] == list(range(len(answer.data)))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    return [item.embedding for item in answer.data]


def both_encodings_have_the_same_numbers():
    # Without encoding_format, the SDK asks for base64 and decodes it. Text has the fewest digits
    # that give the same 32 bits.
    decoded = vectors(TEXTS)
    plain = vectors(TEXTS, encoding_format="float")
    assert [array("f", vector) for vector in plain] == [array("f", vector) for vector in decoded]
    assert len({len(vector) for vector in decoded}) == 1
    for vector in decoded:
        assert abs(math.hypot(*vector) - 1) < 1e-5, math.hypot(*vector)


def a_text_has_the_same_embedding_alone_and_among_others():
    together = vectors(TEXTS)
    assert [vectors(text)[0] for text in TEXTS] == together
    assert len({tuple(vector) for vector in together}) == len(TEXTS)


def errors_have_types():
    for options, wanted in [
        ({"dimensions": 3}, "dimensions"),
        ({"input": []}, "input"),
    ]:
        try:
            client.embeddings.create(**{"model": model, "input": TEXTS, **options})
        except openai.BadRequestError as error:
            assert error.param == wanted, error
        else:
            raise AssertionError(f"{options} has no error")
    try:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Hi"}])
    except openai.BadRequestError as error:
        assert "embeddings" in str(error), error
    else:
        raise AssertionError("a model without an output head has answered")


for check in [
    both_encodings_have_the_same_numbers,
    a_text_has_the_same_embedding_alone_and_among_others,
    errors_have_types,
]:
    check()
    print(f"ok  {check.__name__}")
