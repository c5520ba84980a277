#!/usr/bin/env python3
"""Measures what sparse activations and sparse attention would save in the demo model.

    pip install torch numpy safetensors tokenizers
    benches/sparsity.py

The text is that of benches/training/heldout.json, as chats of up to 1,000 tokens. The model runs
in torch, with ternary weights, int8 activations, and f32 elsewhere.

- Activations: the share of gates that are not positive. Such a gate makes the value of its row of
  `up` zero, and its column of `down` contributes nothing. A kernel can skip only whole blocks, so
  the share of blocks that are zero throughout is printed too.
- Attention: a query keeps the first page, the latest pages, and those whose keys can matter most
  for it: the greatest product that the least and greatest values of the page's keys allow (Quest,
  arXiv:2406.10774). The heads of a KV head keep pages of their own. Printed: the cosine of the
  attention's outputs with those of full attention, and the perplexity of the answers.
"""

import json
import math
import pathlib

import numpy
import tokenizers
import torch
from safetensors import safe_open

BENCHES = pathlib.Path(__file__).resolve().parent
DEMO = BENCHES.parent / "src" / "demo"
PAGE = 16  # Tokens.
LATEST = 4  # Pages that every query keeps, beside the first.
BLOCKS = [2, 4, 8, 16, 32, 64]


class Model:
    """The demo model. It notes what it computes in `seen`."""

    def __init__(self):
        self.config = json.loads((DEMO / "config.json").read_text())
        self.head = self.config["head_dim"]
        with safe_open(DEMO / "model.safetensors", "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        self.tensors = {
            name: unpacked(tensor) if tensor.dtype == torch.uint8 else tensor.float()
            for name, tensor in tensors.items()
        }
        self.keep = None  # The share of pages that a query keeps; all of them if `None`.
        self.seen = {"gates": [], "zero inputs": [], "cosines": []}

    def linear(self, name, x):
        """Multiplies by ternary weights, with one int8 scale for each token."""
        scale = 127 / x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
        q = (x * scale).round().clamp(-128, 127)
        if name.endswith("down_proj"):
            self.seen["zero inputs"].append((q == 0).numpy())
        product = q @ self.tensors[f"{name}.weight"].T
        return product / scale * self.tensors[f"{name}.weight_scale"]

    def norm(self, name, x):
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * self.tensors[f"{name}.weight"]

    def logits(self, tokens):
        embedding = self.tensors["model.embed_tokens.weight"]
        x = embedding[tokens]
        for index in range(self.config["num_hidden_layers"]):
            layer = f"model.layers.{index}"
            rows = self.norm(f"{layer}.input_layernorm", x)
            x = x + self.attention(f"{layer}.self_attn", rows)
            rows = self.norm(f"{layer}.post_attention_layernorm", x)
            gate = self.linear(f"{layer}.mlp.gate_proj", rows)
            self.seen["gates"].append((gate <= 0).numpy())
            gated = gate.relu().square() * self.linear(f"{layer}.mlp.up_proj", rows)
            gated = self.norm(f"{layer}.mlp.ffn_sub_norm", gated)
            x = x + self.linear(f"{layer}.mlp.down_proj", gated)
        return self.norm("model.norm", x) @ embedding.T

    def attention(self, name, x):
        heads = [
            self.linear(f"{name}.{part}_proj", x).unflatten(-1, (-1, self.head)).transpose(0, 1)
            for part in "qkv"
        ]
        q, k, v = rope(heads[0], self.config), rope(heads[1], self.config), heads[2]
        groups = len(q) // len(k)
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        scores = q @ k.transpose(1, 2) / math.sqrt(self.head)
        causal = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~causal, -torch.inf)
        full = out = scores.softmax(-1) @ v
        if self.keep is not None:
            kept = kept_pages(q, k, self.keep)
            allowed = kept.repeat_interleave(PAGE, -1)[..., : scores.shape[-1]]
            out = scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v
            long = slice(16 * PAGE, None)  # Shorter contexts keep nearly everything.
            self.seen["cosines"].append(torch.cosine_similarity(full, out, -1)[:, long].numpy())
        out = self.norm(f"{name}.attn_sub_norm", out.transpose(0, 1).flatten(1))
        return self.linear(f"{name}.o_proj", out)


def unpacked(packed):
    """Returns the ternary values of stacked quarters."""
    parts = [((packed >> shift) & 3).float() - 1 for shift in (0, 2, 4, 6)]
    return torch.cat(parts)


def rope(x, config):
    half = x.shape[-1] // 2
    frequencies = config["rope_theta"] ** (-torch.arange(half) / half)
    angles = torch.arange(x.shape[1])[:, None] * frequencies
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def kept_pages(q, k, share):
    """Returns for each head and query which pages it keeps."""
    heads, tokens, _ = k.shape
    pages = -(-tokens // PAGE)
    padded = torch.nn.functional.pad(k, (0, 0, 0, pages * PAGE - tokens), value=torch.nan)
    by_page = padded.unflatten(1, (pages, PAGE))
    least = by_page.nan_to_num(torch.inf).amin(2)
    greatest = by_page.nan_to_num(-torch.inf).amax(2)
    bound = q.clamp(min=0) @ greatest.transpose(1, 2) + q.clamp(max=0) @ least.transpose(1, 2)
    own = torch.arange(tokens)[:, None] // PAGE
    page = torch.arange(pages)
    always = (page == 0) | (page > own - LATEST)
    visible = page <= own
    bound = bound.masked_fill(~visible, -torch.inf).masked_fill(always & visible, torch.inf)
    count = (share * (own[:, 0] + 1)).ceil().clamp(min=LATEST + 1)
    rank = bound.argsort(-1, descending=True).argsort(-1)
    return (rank < count[None, :, None]) & visible


def chats():
    """Returns chats as token ids, and which of them are in answers."""
    tokenizer = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    template = json.loads((DEMO / "tokenizer_config.json").read_text())
    assert "capitalize + ':\\n'" in template["chat_template"], "the template is another"
    held_out = json.loads((BENCHES / "training" / "heldout.json").read_text())
    order = numpy.random.default_rng(1).permutation(len(held_out["singles"]))
    ids, is_answer = [], []
    begin = tokenizer.token_to_id("<|begin_of_text|>")
    for at in order:
        single = held_out["singles"][at]
        parts = [("User", single["question"], False), ("Assistant", single["answer"], True)]
        turn, answer = [], []
        for role, text, counts in parts:
            head = tokenizer.encode(f"{role}:\n", add_special_tokens=False).ids
            body = tokenizer.encode(f"{text}<|eot_id|>", add_special_tokens=False).ids
            turn += head + body
            answer += [False] * len(head) + [counts] * len(body)
        if len(ids) + len(turn) > 1000:
            yield ids, is_answer
            ids, is_answer = [], []
        if not ids:
            ids, is_answer = [begin], [False]
        ids, is_answer = ids + turn, is_answer + answer
    yield ids, is_answer


def perplexity(model, texts):
    loss, count = 0.0, 0
    for ids, is_answer in texts:
        tokens = torch.tensor(ids)
        found = model.logits(tokens).log_softmax(-1)
        targets = torch.tensor(is_answer)[1:]
        of_next = found[:-1].gather(1, tokens[1:, None])[:, 0]
        loss -= of_next[targets].sum().item()
        count += targets.sum().item()
    return math.exp(loss / count)


def share_of_blocks(zeros, size):
    """Returns the share of blocks of `size` neighbours that are zero throughout."""
    return numpy.mean([z.reshape(len(z), -1, size).all(-1).mean() for z in zeros])


@torch.inference_mode()
def main():
    model, texts = Model(), list(chats())
    tokens = sum(len(ids) for ids, _ in texts)
    print(f"{len(texts)} chats, {tokens} tokens; perplexity {perplexity(model, texts):.3f}")
    print("\nzeros, one token at a time        single" + "".join(f"{f'x {b}':>7}" for b in BLOCKS))
    for name in ("gates", "zero inputs"):
        zeros = model.seen[name]
        label = {"gates": "gates that are not positive", "zero inputs": "zero int8 inputs of down"}
        shares = [share_of_blocks(zeros, block) for block in [1, *BLOCKS]]
        print(f"{label[name]:<34}" + "".join(f"{100 * s:>6.1f}%" for s in shares))
    print("\nattention: share of pages   cosine mean    1 % least   perplexity of answers")
    for keep in (1.0, 0.75, 0.5, 0.35):
        model.keep, model.seen["cosines"] = keep, []
        found = perplexity(model, texts)
        cosines = numpy.concatenate([c.ravel() for c in model.seen["cosines"]])
        least = numpy.quantile(cosines, 0.01)
        print(f"{keep:>25.3f}{cosines.mean():>14.4f}{least:>13.4f}{found:>13.3f}")


if __name__ == "__main__":
    main()
