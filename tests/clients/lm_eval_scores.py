"""Checks log-likelihoods and answers through lm-eval, as its users run it.

lm-eval asks with `local-completions` (echo with log-probabilities) and `local-chat-completions`.
The tasks and the tokenizer are local; nothing is downloaded. The log-likelihoods must equal, bit
for bit, those of a scorer here that never asks for the log-probabilities of a prompt: it forces the
server to draw each token of the continuation and adds up what the draws report.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

DEMO = Path(__file__).resolve().parents[2] / "src" / "demo"
QUESTIONS = [
    ("Q: What is the capital of France?\nA:", [" Paris", " London", " Rome", " a river"], 0),
    ("Q: What is the opposite of hot?\nA:", [" cold", " blue", " seven", " Monday"], 0),
    ("Q: Which day comes after Monday?\nA:", [" Sunday", " Tuesday", " Friday", " red"], 1),
    ("Q: What colour is the sky?\nA:", [" two", " green 🐦", " blue", ""], 2),
]
CHATS = ["What is the capital of France?", "What is two plus three?", "Who are you?"]

flags = argparse.ArgumentParser(description=__doc__)
flags.add_argument("--url", required=True, help="server of the demo model, without /v1")
args = flags.parse_args()

# Before the imports, which read it.
os.environ |= {
    "HF_HOME": tempfile.mkdtemp(dir=os.environ.get("TMPDIR")),
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "LMEVAL_LOG_LEVEL": "ERROR",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
}

import lm_eval  # noqa: E402
import requests  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

tokenizer = AutoTokenizer.from_pretrained(DEMO)
questions = [(q, [c for c in choices if c], best) for q, choices, best in QUESTIONS]


def evaluate(model, task, path, batch_size, concurrent):
    """Runs a task through one of lm-eval's clients. Returns its results and samples."""
    model_args = {
        "model": "default",
        "base_url": args.url + path,
        "num_concurrent": concurrent,
        "max_length": 1024,
        "max_retries": 1,
    }
    if model == "local-completions":
        model_args |= {"tokenizer": str(DEMO), "tokenizer_backend": "huggingface"}
    return lm_eval.simple_evaluate(
        model=model,
        model_args=model_args,
        tasks=[task],
        batch_size=batch_size,
        apply_chat_template=model == "local-chat-completions",
        bootstrap_iters=0,
        log_samples=True,
    )


def task(name, folder, documents, **fields):
    """Returns a task over documents in a local file."""
    file = Path(folder) / f"{name}.json"
    file.write_text("\n".join(json.dumps(document) for document in documents))
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "metadata": {"version": 1},
        **fields,
    }


def forced(context, continuation):
    """Returns the log-probability with which the model draws a continuation, and whether each token
    of it is the most likely one."""
    total, is_greedy = 0.0, True
    for token in continuation:
        answer = requests.post(
            args.url + "/v1/completions",
            json={
                "prompt": context,
                "max_tokens": 1,
                "temperature": 0,
                "logprobs": 1,
                "logit_bias": {str(token): 100},
                "ignore_eos": True,
                "return_token_ids": True,
            },
            timeout=60,
        ).json()["choices"][0]
        assert answer["token_ids"] == [token], answer
        logprob = answer["logprobs"]["token_logprobs"][0]
        total += logprob
        is_greedy &= logprob == max(answer["logprobs"]["top_logprobs"][0].values())
        context = context + [token]
    return total, is_greedy


def log_likelihoods_equal_those_of_draws(folder):
    documents = [{"q": q, "choices": c, "best": best} for q, c, best in questions]
    scored = task(
        "capitals",
        folder,
        documents,
        output_type="multiple_choice",
        doc_to_text="{{q}}",
        doc_to_choice="{{choices}}",
        doc_to_target="best",
        target_delimiter="",
        metric_list=[{"metric": "acc"}],
    )
    expected = []
    for question, choices, _ in questions:
        context = tokenizer(question, add_special_tokens=False).input_ids
        for choice in choices:
            whole = tokenizer(question + choice, add_special_tokens=False).input_ids
            expected.append(forced(context, whole[len(context) :]))
    for batch_size, concurrent in [(1, 1), (4, 1), (2, 4)]:
        result = evaluate(
            "local-completions", scored, "/v1/completions", batch_size, concurrent
        )
        samples = sorted(result["samples"]["capitals"], key=lambda sample: sample["doc_id"])
        found = [tuple(response) for sample in samples for response in sample["filtered_resps"]]
        assert found == expected, (batch_size, concurrent, found, expected)
    return f"{len(expected)} log-likelihoods, acc {result['results']['capitals']['acc,none']}"


def perplexity_is_that_of_draws(folder):
    texts = [question + choices[best] for question, choices, best in questions]
    rolling = task(
        "perplexity",
        folder,
        [{"text": text} for text in texts],
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[{"metric": "bits_per_byte"}],
    )
    result = evaluate("local-completions", rolling, "/v1/completions", 1, 1)
    samples = sorted(result["samples"]["perplexity"], key=lambda sample: sample["doc_id"])
    for sample, text in zip(samples, texts, strict=True):
        tokens = tokenizer(text, add_special_tokens=False).input_ids
        expected, _ = forced([tokenizer.bos_token_id], tokens)
        assert sample["filtered_resps"][0] in (expected, [expected]), (sample, expected)
    return f"bits per byte {result['results']['perplexity']['bits_per_byte,none']:.4f}"


def chat_answers_are_the_servers(folder):
    chats = task(
        "chats",
        folder,
        [{"q": question} for question in CHATS],
        output_type="generate_until",
        doc_to_text="{{q}}",
        doc_to_target="",
        generation_kwargs={"until": ["\n\n"], "max_gen_toks": 24},
        metric_list=[{"metric": "exact_match"}],
    )
    result = evaluate("local-chat-completions", chats, "/v1/chat/completions", 1, 2)
    samples = sorted(result["samples"]["chats"], key=lambda sample: sample["doc_id"])
    for sample, question in zip(samples, CHATS, strict=True):
        answer = requests.post(
            args.url + "/v1/chat/completions",
            json={
                "messages": [{"role": "user", "content": question}],
                "temperature": 0,
                "max_tokens": 24,
                "stop": ["\n\n"],
            },
            timeout=60,
        ).json()
        expected = answer["choices"][0]["message"]["content"]
        assert sample["resps"][0][0] == expected, (sample["resps"], expected)
    return f"{len(samples)} answers"


def main():
    failures = 0
    for check in [
        log_likelihoods_equal_those_of_draws,
        perplexity_is_that_of_draws,
        chat_answers_are_the_servers,
    ]:
        with tempfile.TemporaryDirectory() as folder:
            try:
                figures = check(folder)
                print(f"ok   {check.__name__.replace('_', ' ')}: {figures}", flush=True)
            except AssertionError as error:
                failures += 1
                print(f"FAIL {check.__name__.replace('_', ' ')}: {error}", flush=True)
    print(f"lm-eval {lm_eval.__version__}: {3 - failures} passed, {failures} failed")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
