"""Checks log-likelihoods and answers through lm-eval, as its users run it.

lm-eval asks with `local-completions` (echo with log-probabilities) and `local-chat-completions`.
The tasks and the tokenizer are local; nothing is downloaded. The log-likelihoods must equal, bit
for bit, those of a scorer here that never asks for the log-probabilities of a prompt: it forces the
server to draw each token of the continuation and adds up what the draws report.

They must also equal those of `transformers`, which `lm_eval_reference.py` stored, as closely as
`tests/golden/` demands: within twice the worst and 1.5 times the mean spread of that reference.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

DEMO = Path(__file__).resolve().parents[2] / "src" / "demo"
CHATS = ["What is the capital of France?", "What is two plus three?", "Who are you?"]

# As in tests/golden/main.rs, which compares log-probabilities of single tokens.
WORST_OF_SPREAD = 2.0
MEAN_OF_SPREAD = 1.5

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
from lm_eval_questions import QUESTIONS, requests_of  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

tokenizer = AutoTokenizer.from_pretrained(DEMO)
reference = json.loads(Path(__file__).with_name("lm_eval_reference.json").read_text())
choice_requests, text_requests = requests_of(tokenizer)


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


def compare_with_transformers(kind, requests, found):
    """Compares log-likelihoods with those of `transformers`. Returns the worst difference."""
    entries = reference[kind]
    stored = [(entry["context"], entry["continuation"]) for entry in entries]
    assert stored == requests, f"run lm_eval_reference.py again: the {kind} changed"
    wanted = [entry["log_likelihood"] for entry in entries]
    differences = [abs(a - b) for a, b in zip(found, wanted, strict=True)]
    worst, mean = max(differences), sum(differences) / len(differences)
    assert worst <= WORST_OF_SPREAD * reference["spread_worst"][kind], (kind, found, wanted)
    assert mean <= MEAN_OF_SPREAD * reference["spread_mean"][kind], (kind, found, wanted)
    return f"at most {worst:.4f} and on average {mean:.4f} from transformers"


def log_likelihoods_equal_those_of_draws(folder):
    documents = [{"q": q, "choices": c, "best": best} for q, c, best in QUESTIONS]
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
    expected = [forced(*request) for request in choice_requests]
    for batch_size, concurrent in [(1, 1), (4, 1), (2, 4)]:
        result = evaluate(
            "local-completions", scored, "/v1/completions", batch_size, concurrent
        )
        samples = sorted(result["samples"]["capitals"], key=lambda sample: sample["doc_id"])
        found = [tuple(response) for sample in samples for response in sample["filtered_resps"]]
        assert found == expected, (batch_size, concurrent, found, expected)
    distance = compare_with_transformers("choices", choice_requests, [total for total, _ in found])
    accuracy = result["results"]["capitals"]["acc,none"]
    return f"{len(expected)} log-likelihoods, acc {accuracy}; {distance}"


def perplexity_is_that_of_draws(folder):
    texts = [question + choices[best] for question, choices, best in QUESTIONS]
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
    totals = [forced(*request)[0] for request in text_requests]
    for sample, expected in zip(samples, totals, strict=True):
        assert sample["filtered_resps"][0] in (expected, [expected]), (sample, expected)
    distance = compare_with_transformers("texts", text_requests, totals)
    bits = result["results"]["perplexity"]["bits_per_byte,none"]
    return f"bits per byte {bits:.4f}; {distance}"


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
