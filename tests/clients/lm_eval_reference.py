"""Writes `lm_eval_reference.json`: what `transformers` computes for the requests of
`lm_eval_scores.py`.

    pip install torch transformers accelerate safetensors tokenizers jinja2
    python tests/clients/lm_eval_reference.py

The reference runs five ways, as `tests/make_fixtures.py` explains. The log-likelihood is that of
the first run. The spread is how far the other four runs are from the one with K and V in f16, as
Sterna stores them. It is that of whole log-likelihoods, as lm-eval gets them. Sums over more tokens
spread more, so the choices and the longer texts have a spread each.
"""

import json
import platform
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
DEMO = HERE.parents[1] / "src" / "demo"
sys.path.insert(0, str(HERE.parent))

from lm_eval_questions import requests_of  # noqa: E402
from make_fixtures import Reference, torch, transformers, weights_crc32  # noqa: E402


def log_likelihoods(reference, context, continuation):
    """Returns the log-likelihood in each of the five runs; the last one has K and V in f16."""
    tokens = context + continuation
    runs = [reference.whole(tokens, attention) for attention in ("eager", "sdpa")]
    runs += [reference.cached(tokens, len(context), attention) for attention in ("eager", "sdpa")]
    runs.append(reference.whole(tokens, "f16_cache"))
    wanted = torch.tensor(continuation).unsqueeze(-1)
    rows = [run.log_softmax(-1)[len(context) - 1 : -1] for run in runs]
    return [row.gather(-1, wanted).sum().item() for row in rows]


def main():
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    with torch.no_grad():
        reference = Reference(DEMO)
        entries, spreads = {}, {}
        for kind, requests in zip(("choices", "texts"), requests_of(reference.tokenizer)):
            entries[kind], spreads[kind] = [], []
            for context, continuation in requests:
                *runs, rounded = log_likelihoods(reference, context, continuation)
                spreads[kind] += [abs(run - rounded) for run in runs]
                entries[kind].append(
                    {
                        "context": context,
                        "continuation": continuation,
                        "log_likelihood": round(runs[0], 6),
                    }
                )
    value = {
        "made_with": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "weights_crc32": weights_crc32(DEMO),
        "spread_worst": {kind: round(max(parts), 6) for kind, parts in spreads.items()},
        "spread_mean": {kind: round(sum(parts) / len(parts), 6) for kind, parts in spreads.items()},
    }
    lines = [f"{json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()]
    for kind, items in entries.items():
        rows = ",\n ".join(json.dumps(item) for item in items)
        lines.append(f"{json.dumps(kind)}: [\n {rows}\n]")
    (HERE / "lm_eval_reference.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
