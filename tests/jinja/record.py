#!/usr/bin/env python3
"""Records what `transformers` writes for the templates of constructs.txt.

    record.py            writes recorded.json
    record.py --check    fails if the installed `transformers` writes something else

A case is a template. Its answer is a text, or null if the template cannot be compiled or rendered.
A line of three hyphens stands between two cases. Every template sees the variables of
variables.json. Needs the package `transformers`; run.sh installs it.
"""

import json
import pathlib
import sys

from transformers.utils.chat_template_utils import _compile_jinja_template

FOLDER = pathlib.Path(__file__).parent


def answer(template, variables):
    try:
        return _compile_jinja_template(template).render(**variables)
    except Exception:
        return None


def main():
    variables = json.loads((FOLDER / "variables.json").read_text())
    templates = (FOLDER / "constructs.txt").read_text().removesuffix("\n").split("\n---\n")
    answers = [{"template": one, "answer": answer(one, variables)} for one in templates]
    text = json.dumps(answers, indent=1, ensure_ascii=False) + "\n"
    recorded = FOLDER / "recorded.json"
    if "--check" not in sys.argv:
        recorded.write_text(text)
    elif json.loads(recorded.read_text()) != answers:
        for old, new in zip(json.loads(recorded.read_text()), answers):
            if old != new:
                print(f"{new['template']!r}: {old['answer']!r} is recorded, got {new['answer']!r}")
        sys.exit("recorded.json is not what this version of transformers writes")


main()
